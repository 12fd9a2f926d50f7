//! Tokens sorted by expert on CUDA: the lists stay on the device, and no size comes to the host.

use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, compiled, empty, ghosts, started};
use crate::ledger::Role;
use candle_core::{DType, Result};

/// Threads of a block, as in group.cu.
const THREADS: u32 = 128;
const SORT_THREADS: u32 = 512;
const TILE_THREADS: u32 = 256;
/// Rows of a tile of the grouped products: for few rows an expert, for many, in f32.
const FEW: usize = 32;
const MANY: usize = 128;
const PLAIN: usize = 64;

/// The pairs of tokens and experts sorted by expert: the rows that experts work on, and the schedule of their products.
#[derive(Clone, Debug)]
pub struct Sorted {
    /// Tokens.
    pub tokens: usize,
    /// Experts a token.
    pub top_k: usize,
    /// Experts.
    pub experts: usize,
    /// Rows of a tile.
    pub side: usize,
    /// Expert of each pair [t, k], u32.
    pub chosen: Tensor,
    /// First row of each expert, and the end of the last [e + 1], u32.
    pub starts: Tensor,
    /// Token of each row `[n]`, u32.
    token: Tensor,
    /// Pair of each row `[n]`, u32.
    pub pair: Tensor,
    /// Row of each pair `[n]`, u32.
    place: Tensor,
    /// Expert and first row of each tile [tiles, 2], u32: the most that there may be, in any distribution.
    pub tiles: Tensor,
}

impl Sorted {
    /// Sorts the pairs of `chosen` [t, k] for products in `dtype`.
    pub fn new(chosen: &Tensor, experts: usize, dtype: DType) -> Result<Self> {
        let (tokens, top_k) = chosen.dims2()?;
        let n = tokens * top_k;
        let side = match dtype {
            DType::F32 => PLAIN,
            // on average they fit one: each tile reads the expert's whole matrix
            _ if n < experts * FEW => FEW,
            _ => MANY,
        };
        let most = n / side + n.min(experts);
        let shapes = [(experts + 1).into(), n.into(), n.into(), n.into(), (most, 2).into()];
        let lists = match chosen
            .role(Role::Activations, || ghosts(&[chosen], shapes.clone().map(|s| (s, DType::U32)), started))
        {
            Some(lists) => lists,
            None => {
                let [a, b, c, d, e] = shapes.map(|s: candle_core::Shape| empty(chosen, s, DType::U32));
                [a?, b?, c?, d?, e?]
            }
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
        let launch = Launch::named(&self.chosen, compiled!(GROUP), "group_sort")?
            .tensor(&self.chosen)?
            .count(self.rows())?
            .count(self.top_k)?
            .tensor(&self.starts)?
            .tensor(&self.token)?
            .tensor(&self.pair)?
            .tensor(&self.place)?;
        // SAFETY: n pairs, whose experts route.cu has chosen among those that there are; a block an expert.
        unsafe { launch.run(Grid::new(self.experts, SORT_THREADS)) }?;
        let launch = Launch::named(&self.chosen, compiled!(GROUP), "group_tiles")?
            .tensor(&self.starts)?
            .count(self.experts)?
            .count(self.side)?
            .count(tiles)?
            .tensor(&self.tiles)?;
        let grid = Grid::new(tiles.div_ceil(TILE_THREADS as usize), TILE_THREADS).shared(4 * self.experts);
        // SAFETY: a number of shared memory for each expert, and as many tiles as the list has.
        unsafe { launch.run(grid) }
    }

    /// Rows of all experts.
    pub fn rows(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Whether the tiles are those for few rows an expert.
    pub fn few(&self) -> bool {
        self.side == FEW
    }

    /// Whether the tiles are those for many rows, and experts have less than one tile on average.
    pub fn half_full(&self) -> bool {
        self.side == MANY && self.rows() < self.experts * MANY
    }

    /// The share of experts that have tokens, where tokens are spread evenly.
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

    /// Rows of `x` [t, d] sorted by expert: [n, d].
    pub fn gather(&self, x: &Tensor) -> Result<Tensor> {
        let (n, d) = (self.rows(), self.width(x, self.tokens)?);
        if let Some([y]) = ghosts(&[x], [((n, d).into(), x.dtype())], |_| ()) {
            return Ok(y);
        }
        let x = x.contiguous()?;
        let y = empty(&x, (n, d), x.dtype())?;
        let launch = Launch::of(&x, compiled!(GROUP), "group_gather")?
            .tensor(&x)?
            .tensor(&self.token)?
            .count(d)?
            .tensor(&y)?;
        // SAFETY: t rows of d values, n numbers of tokens, n rows of d values: a block each.
        unsafe { launch.run(Grid::new(n, THREADS)) }?;
        Ok(y)
    }

    /// The gradient of gates [t, k] f32, given that of what [`Sorted::combine`] made of `rows` [n, d] and `gates`; `rows` become
    /// their own gradient.
    pub fn scale(&self, rows: &Tensor, gates: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let (n, d) = (self.rows(), self.width(dy, self.tokens)?);
        if rows.dims() != [n, d] || rows.dtype() != dy.dtype() || gates.elem_count() != n {
            candle_core::bail!("routing: {:?} with {:?} of {gates:?}", rows.shape(), dy.shape());
        }
        let shape = (self.tokens, self.top_k);
        if let Some([dgates]) = ghosts(&[dy], [(shape.into(), DType::F32)], |_| ()) {
            return Ok(dgates);
        }
        let dy = dy.contiguous()?;
        let dgates = empty(&dy, shape, DType::F32)?;
        let launch = Launch::of(&dy, compiled!(GROUP), "group_scale")?
            .tensor(&dy)?
            .tensor(&self.token)?
            .tensor(&self.pair)?
            .tensor(gates)?
            .count(d)?
            .tensor(rows)?
            .tensor(&dgates)?;
        // SAFETY: as gather; n gates and their gradients.
        unsafe { launch.run(Grid::new(n, THREADS)) }?;
        Ok(dgates)
    }

    /// `y[t] = add[t] + sum over j of gates[t, j] * row(t, j)` in the order of j, of `rows` [n, d]; without gates the plain sum.
    pub fn combine(&self, rows: &Tensor, gates: Option<&Tensor>, add: Option<&Tensor>) -> Result<Tensor> {
        let (t, d) = (self.tokens, self.width(rows, self.rows())?);
        if add.is_some_and(|a| a.dims() != [t, d] || a.dtype() != rows.dtype())
            || gates.is_some_and(|g| g.elem_count() != self.rows())
        {
            candle_core::bail!("routing: {:?} with {gates:?} and {add:?}", rows.shape());
        }
        let reads: Vec<&Tensor> = [rows].into_iter().chain(add).collect();
        if let Some([y]) = ghosts(&reads, [((t, d).into(), rows.dtype())], |_| ()) {
            return Ok(y);
        }
        let (rows, add) = (rows.contiguous()?, add.map(Tensor::contiguous).transpose()?);
        let y = empty(&rows, (t, d), rows.dtype())?;
        let launch = Launch::of(&rows, compiled!(GROUP), "group_combine")?
            .tensor(&rows)?
            .tensor(&self.place)?
            .maybe(gates)?
            .maybe(add.as_ref())?
            .count(self.top_k)?
            .count(d)?
            .tensor(&y)?;
        // SAFETY: n rows of d values, n places and gates; t rows of d values of what is added and of the sum.
        unsafe { launch.run(Grid::new(t, THREADS)) }?;
        Ok(y)
    }
}
