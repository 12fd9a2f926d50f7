//! Tokens sorted by expert on CUDA, without a host synchronization: index lists and sizes stay on the
//! device.

use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::ledger::Role;
use crate::tensor::{all_of, ghosts, ghosts_and, started};
use candle_core::{DType, Result, Shape};

/// Threads per block; must match dispatch.cu.
const THREADS: u32 = 128;
const SORT_THREADS: u32 = 512;
const TILE_THREADS: u32 = 256;
/// Rows per tile of the grouped products: few rows per expert, many, and f32.
const FEW: usize = 32;
const MANY: usize = 128;
const PLAIN: usize = 64;
/// Most tiles of a launch, which has them along y of its grid.
const MOST_TILES: usize = 65_535;

/// (token, expert) pairs sorted by expert: the experts' input rows, and the tile schedule of the grouped
/// products.
#[derive(Clone, Debug)]
pub struct Sorted {
    /// Number of tokens.
    pub tokens: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Number of experts.
    pub experts: usize,
    /// Rows per tile.
    pub side: usize,
    /// Expert per pair [t, k], u32.
    pub chosen: Tensor,
    /// First row of each expert, and the end of the last [e + 1], u32.
    pub starts: Tensor,
    /// Token per row `[n]`, u32.
    token: Tensor,
    /// Pair per row `[n]`, u32.
    pub pair: Tensor,
    /// Row per pair `[n]`, u32.
    place: Tensor,
    /// Expert and first row per tile [tiles, 2], u32. Sized for the worst-case distribution.
    pub tiles: Tensor,
}

impl Sorted {
    /// Sorts the pairs of `chosen` [t, k] for products in `dtype`.
    pub fn new(chosen: &Tensor, experts: usize, dtype: DType) -> Result<Self> {
        let (tokens, top_k) = chosen.dims2()?;
        let n = tokens * top_k;
        let side = match dtype {
            DType::F32 => PLAIN,
            // average rows per expert fit one small tile; every tile reads the expert's whole matrix
            _ if n < experts * FEW => FEW,
            _ => MANY,
        };
        let most = n / side + n.min(experts);
        if most > MOST_TILES {
            candle_core::bail!("{n} rows of experts are too many for one micro-batch");
        }
        let shapes = [(experts + 1).into(), n.into(), n.into(), n.into(), (most, 2).into()];
        let lists = match chosen
            .role(Role::Activations, || ghosts(&[chosen], shapes.clone().map(|s| (s, DType::U32)), started))
        {
            Some(lists) => lists,
            None => all_of(shapes.map(|s: Shape| empty(chosen, s, DType::U32)))?,
        };
        let [starts, token, pair, place, tiles] = lists;
        let chosen = chosen.clone();
        let s = Self { tokens, top_k, experts, side, chosen, starts, token, pair, place, tiles };
        if s.chosen.ghost().is_none() {
            s.sort(most)?;
        }
        Ok(s)
    }

    fn sort(&self, tiles: usize) -> Result<()> {
        let launch = Launch::named(&self.chosen, compiled!(DISPATCH), "dispatch_sort")?;
        let launch = launch.with(args![&self.chosen, self.rows(), self.top_k, &self.starts, &self.token])?;
        let launch = launch.with(args![&self.pair, &self.place])?;
        // SAFETY: `chosen` has n pairs with expert indices below `experts` (checked by route.cu); one
        // block per expert; all outputs have the sizes above.
        unsafe { launch.run(Grid::new(self.experts, SORT_THREADS)) }?;
        let launch = Launch::named(&self.chosen, compiled!(DISPATCH), "dispatch_tiles")?;
        let launch = launch.with(args![&self.starts, self.experts, self.side, tiles, &self.tiles])?;
        let grid = Grid::new(tiles.div_ceil(TILE_THREADS as usize), TILE_THREADS).shared(4 * self.experts);
        // SAFETY: shared memory holds one u32 per expert; the list has `tiles` entries.
        unsafe { launch.run(grid) }
    }

    /// Rows of each expert, and if asked for the token of each row: waits for the device.
    pub fn on_host(&self, tokens: bool) -> Result<(Vec<u32>, Vec<u32>)> {
        let starts = self.starts.real()?.to_vec1::<u32>()?;
        let counts = starts.windows(2).map(|w| w[1] - w[0]).collect();
        Ok((counts, if tokens { self.token.real()?.to_vec1()? } else { Vec::new() }))
    }

    /// Total rows of all experts, n.
    pub fn rows(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Whether tiles are sized for few rows per expert.
    pub fn few(&self) -> bool {
        self.side == FEW
    }

    /// Expected share of experts with tokens, under uniform routing.
    pub fn busy(&self) -> f64 {
        1.0 - (1.0 - self.top_k as f64 / self.experts.max(1) as f64).max(0.0).powf(self.tokens as f64)
    }

    fn width(&self, x: &Tensor, rows: usize) -> Result<usize> {
        let (n, d) = x.dims2()?;
        if n != rows || d == 0 {
            candle_core::bail!("routing: {:?} for {rows} rows", x.shape());
        }
        Ok(d)
    }

    /// Rows of `x` [t, d] in expert order: [n, d].
    pub fn gather(&self, x: &Tensor) -> Result<Tensor> {
        let (n, d) = (self.rows(), self.width(x, self.tokens)?);
        if let Some([y]) = ghosts(&[x], [((n, d).into(), x.dtype())], |_| ()) {
            return Ok(y);
        }
        let x = x.contiguous()?;
        let y = empty(&x, (n, d), x.dtype())?;
        let launch =
            Launch::of(&x, compiled!(DISPATCH), "dispatch_gather")?.with(args![&x, &self.token, d, &y])?;
        // SAFETY: x is [t, d], y is [n, d], the list has n token indices; one block per row.
        unsafe { launch.run(Grid::new(n, THREADS)) }?;
        Ok(y)
    }

    /// Backward pass of [`Sorted::combine`]. Returns the gradient of the gates [t, k] in f32, and
    /// overwrites `rows` [n, d] with the gradient of `rows`.
    pub fn scale(&self, rows: &Tensor, gates: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let (n, d) = (self.rows(), self.width(dy, self.tokens)?);
        let factors = gates.elem_count() == n && gates.dtype() == DType::F32;
        if rows.dims() != [n, d] || rows.dtype() != dy.dtype() || !factors {
            candle_core::bail!("routing: {:?} with {:?} of {gates:?}", rows.shape(), dy.shape());
        }
        let shape = (self.tokens, self.top_k);
        if let Some([dgates]) = ghosts(&[dy], [(shape.into(), DType::F32)], |_| ()) {
            return Ok(dgates);
        }
        let dy = dy.contiguous()?;
        let dgates = empty(&dy, shape, DType::F32)?;
        let launch = Launch::of(&dy, compiled!(DISPATCH), "dispatch_scale")?;
        let launch = launch.with(args![&dy, &self.token, &self.pair, gates, d, rows, &dgates])?;
        // SAFETY: as in `gather`; gates and gate gradients have n values.
        unsafe { launch.run(Grid::new(n, THREADS)) }?;
        Ok(dgates)
    }

    /// `rows` [n, width] times their gates [t, k], in place if asked for.
    pub fn weigh(&self, rows: &Tensor, gates: &Tensor, in_place: bool) -> Result<Tensor> {
        let (n, width) = (self.rows(), self.width(rows, self.rows())?);
        if gates.elem_count() != n || gates.dtype() != DType::F32 || in_place && !rows.is_contiguous() {
            candle_core::bail!("routing: {:?} with {gates:?}", rows.shape());
        }
        let new = (!in_place).then(|| ((n, width).into(), rows.dtype()));
        if let Some(([], y)) = ghosts_and(&[rows, gates], [], new) {
            return Ok(y.unwrap_or_else(|| rows.clone()));
        }
        let x = rows.contiguous()?;
        let y = if in_place { x.clone() } else { empty(&x, (n, width), x.dtype())? };
        let values = n * width;
        let launch = Launch::of(&x, compiled!(DISPATCH), "dispatch_weigh")?;
        let launch = launch.with(args![&x, &self.pair, gates, values as u64, width, &y])?;
        let each = THREADS as usize * 16 / x.dtype().size_in_bytes();
        // SAFETY: x and y have n rows of `width` values, a thread reads values before it writes them; the n pairs are
        // those of the gates.
        unsafe { launch.run(Grid::new(values.div_ceil(each), THREADS)) }?;
        Ok(y)
    }

    /// `y[t] = add[t] + sum over j of gates[t, j] * row(t, j)`, in the order of j, for `rows` [n, d]; a
    /// plain sum without gates.
    pub fn combine(&self, rows: &Tensor, gates: Option<&Tensor>, add: Option<&Tensor>) -> Result<Tensor> {
        let (t, d) = (self.tokens, self.width(rows, self.rows())?);
        if add.is_some_and(|a| a.dims() != [t, d] || a.dtype() != rows.dtype())
            || gates.is_some_and(|g| g.elem_count() != self.rows() || g.dtype() != DType::F32)
        {
            candle_core::bail!("routing: {:?} with {gates:?} and {add:?}", rows.shape());
        }
        let reads: Vec<&Tensor> = [rows].into_iter().chain(add).collect();
        if let Some([y]) = ghosts(&reads, [((t, d).into(), rows.dtype())], |_| ()) {
            return Ok(y);
        }
        let (rows, add) = (rows.contiguous()?, add.map(Tensor::contiguous).transpose()?);
        let y = empty(&rows, (t, d), rows.dtype())?;
        let launch = Launch::of(&rows, compiled!(DISPATCH), "dispatch_combine")?;
        let launch = launch.with(args![&rows, &self.place, gates, add.as_ref(), self.top_k, d, &y])?;
        // SAFETY: rows is [n, d], `place` and gates have n values, `add` and y are [t, d]; one block per
        // token.
        unsafe { launch.run(Grid::new(t, THREADS)) }?;
        Ok(y)
    }
}
