//! One chunk of the delta rule, for one value head.
//!
//! With queries Q and keys K `[l, k]`, values V `[l, v]`, rates `b`, cumulative log-decays G within the chunk, and the
//! state S `[k, v]` before it (all products per chunk; Yang et al., section 3.3):
//!
//! ```text
//! D_ij = exp(G_i - G_j)                        for j <= i
//! T_ij = b_i D_ij (k_i . k_j)                  for j < i
//! A_ij = D_ij (q_i . k_j)                      for j <= i
//! X    = V - exp(G) K S,   (1 + T) U = b X
//! O    = exp(G) Q S + A U
//! S'   = exp(G_l) S + (exp(G_l - G) K)^T U
//! ```

use crate::cpu::{Float, dot, vectorised};
use crate::gemm::{Mat, gemm};

/// Rows of a triangular solve that are solved one by one; the blocks before them are products.
const ROWS: usize = 16;

/// Sizes of a chunk: tokens, channels of a key, channels of a value.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub l: usize,
    pub k: usize,
    pub v: usize,
}

/// Inputs of a chunk.
pub struct Chunk<'a, T> {
    pub sizes: Sizes,
    /// Normalized queries and keys `[l, k]`.
    pub q: &'a [T],
    pub k: &'a [T],
    /// `q_i . k_j` and `k_i . k_j` `[l, l]`.
    pub qk: &'a [T],
    pub kk: &'a [T],
    /// Values, row by row with a stride.
    pub v: (&'a [T], usize),
    /// Rates `[l]`.
    pub rate: &'a [T],
    /// Cumulative log-decays `[l]`.
    pub cum: &'a [T],
}

/// Buffers of a chunk, for up to `l` tokens.
pub struct Room<T> {
    /// D, A, T, and the gradients of A and T `[l, l]`.
    d: Vec<T>,
    a: Vec<T>,
    t: Vec<T>,
    da: Vec<T>,
    dt: Vec<T>,
    /// `K S`, `Q S`, gradients of U `[l, v]`.
    ks: Vec<T>,
    qs: Vec<T>,
    du: Vec<T>,
    /// Scaled keys or queries, and their gradients `[l, k]`.
    scaled: Vec<T>,
    wide: Vec<T>,
    /// Gradient of X `[l, v]`.
    dx: Vec<T>,
}

impl<T: Float> Room<T> {
    pub fn new(Sizes { l, k, v }: Sizes, backward: bool) -> Self {
        let of = |n: usize| vec![T::zero(); n];
        let more = |n: usize| of(if backward { n } else { 0 });
        Self {
            d: of(l * l),
            a: of(l * l),
            t: of(l * l),
            da: more(l * l),
            dt: more(l * l),
            ks: of(l * v),
            qs: more(l * v),
            du: more(l * v),
            scaled: of(l * k),
            wide: more(l * k),
            dx: more(l * v),
        }
    }

    /// Values of the buffers.
    pub fn values(Sizes { l, k, v }: Sizes, backward: bool) -> usize {
        if backward { 5 * l * l + 4 * l * v + 2 * l * k } else { 3 * l * l + l * v + l * k }
    }
}

impl<T: Float> Chunk<'_, T> {
    /// `exp(G_i - G_j)`; 1 at most.
    fn between(&self, i: usize, j: usize) -> T {
        (self.cum[i] - self.cum[j]).exp()
    }

    /// `exp(G_l)`.
    fn last(&self) -> T {
        self.cum[self.sizes.l - 1].exp()
    }

    fn mat<'m>(&self, x: &'m [T], cols: usize) -> Mat<'m, T> {
        Mat::new(x, self.sizes.l, cols, cols)
    }

    /// Fills D, A and T.
    fn decayed(&self, room: &mut Room<T>) {
        let l = self.sizes.l;
        for i in 0..l {
            let own = i * l..(i + 1) * l;
            let (d, a, t) = (&mut room.d[own.clone()], &mut room.a[own.clone()], &mut room.t[own.clone()]);
            let (qk, kk) = (&self.qk[own.clone()], &self.kk[own]);
            let (cum, rate) = (self.cum[i], self.rate[i]);
            vectorised(|| {
                d[..=i].iter_mut().zip(self.cum).for_each(|(d, c)| *d = (cum - *c).exp());
                a[..=i].iter_mut().zip(&*d).zip(qk).for_each(|((a, d), x)| *a = *d * *x);
                t[..i].iter_mut().zip(&*d).zip(kk).for_each(|((t, d), x)| *t = rate * *d * *x);
            });
            d[i + 1..].fill(T::zero());
            a[i + 1..].fill(T::zero());
            t[i..].fill(T::zero());
        }
    }

    /// Forward pass: writes U `[l, v]`, and O to `o` (with its stride) if given, and moves the state on.
    pub fn forward(&self, s: &mut [T], u: &mut [T], o: Option<(&mut [T], usize)>, room: &mut Room<T>) {
        let Sizes { l, k, v } = self.sizes;
        self.decayed(room);
        let state = Mat::new(s, k, v, v);
        gemm(&mut room.ks[..l * v], v, false, self.mat(self.k, k), state, T::one(), false);
        for i in 0..l {
            let (decay, rate) = (self.cum[i].exp(), self.rate[i]);
            let (value, ks) = (&self.v.0[i * self.v.1..][..v], &room.ks[i * v..][..v]);
            let u = &mut u[i * v..][..v];
            vectorised(|| {
                u.iter_mut().zip(value).zip(ks).for_each(|((u, x), ks)| *u = rate * (*x - decay * *ks));
            });
        }
        solve(&room.t, u, l, v, false);
        if let Some((o, stride)) = o {
            gemm(o, stride, false, self.mat(self.q, k), state, T::one(), false);
            for (i, o) in o.chunks_mut(stride).take(l).enumerate() {
                let decay = self.cum[i].exp();
                o[..v].iter_mut().for_each(|o| *o *= decay);
            }
            gemm(o, stride, true, self.mat(&room.a, l), self.mat(u, v), T::one(), false);
        }
        self.keys_to_the_end(&mut room.scaled);
        let decay = self.last();
        s.iter_mut().for_each(|s| *s *= decay);
        gemm(s, v, true, self.mat(&room.scaled, k).t(), self.mat(u, v), T::one(), false);
    }

    /// `exp(G_l - G) K`.
    fn keys_to_the_end(&self, out: &mut [T]) {
        let Sizes { l, k, .. } = self.sizes;
        for i in 0..l {
            let decay = self.between(l - 1, i);
            let (out, key) = (&mut out[i * k..][..k], &self.k[i * k..][..k]);
            out.iter_mut().zip(key).for_each(|(o, k)| *o = decay * *k);
        }
    }

    /// Backward pass. `s` is the state before the chunk, `u` the U of the forward pass, `d_o` the gradient of O with
    /// its stride. `ds` `[k, v]` is the gradient of the state after the chunk and becomes that of the state before it.
    /// Adds to `dq` and `dk` `[l, k]`; writes `dv` (with its stride), `d_rate` and `d_log` `[l]`, the gradients of the
    /// rates and of the log-decays.
    pub fn backward(
        &self,
        (s, u): (&[T], &[T]),
        d_o: (&[T], usize),
        out: Gradients<'_, T>,
        room: &mut Room<T>,
    ) {
        let Sizes { l, k, v } = self.sizes;
        let Gradients { ds, dq, dk, dv, d_rate, d_log } = out;
        self.decayed(room);
        d_log.fill(T::zero());
        let (one, d_o_mat) = (T::one(), Mat::new(d_o.0, l, v, d_o.1));
        let state = Mat::new(s, k, v, v);
        gemm(&mut room.ks[..l * v], v, false, self.mat(self.k, k), state, one, false);
        gemm(&mut room.qs[..l * v], v, false, self.mat(self.q, k), state, one, false);
        // dU = A^T dO + (exp(G_l - G) K) dS'
        self.keys_to_the_end(&mut room.scaled);
        gemm(&mut room.du[..l * v], v, false, self.mat(&room.a, l).t(), d_o_mat, one, false);
        let ds_mat = Mat::new(&*ds, k, v, v);
        gemm(&mut room.du[..l * v], v, true, self.mat(&room.scaled, k), ds_mat, one, false);
        // the keys to the end, and their decays
        gemm(&mut room.wide[..l * k], k, false, self.mat(u, v), ds_mat.t(), one, false);
        for i in 0..l {
            let decay = self.between(l - 1, i);
            let (wide, own) = (&room.wide[i * k..][..k], i * k..(i + 1) * k);
            let moved = dot(wide, &room.scaled[own.clone()]);
            d_log[i] -= moved;
            d_log[l - 1] += moved;
            dk[own].iter_mut().zip(wide).for_each(|(dk, w)| *dk += decay * *w);
        }
        d_log[l - 1] += self.last() * dot(ds, s);
        // dA = dO U^T, dR = (1 + T)^-T dU, dT = - dR U^T
        gemm(&mut room.da[..l * l], l, false, d_o_mat, self.mat(u, v).t(), one, false);
        solve(&room.t, &mut room.du, l, v, true);
        gemm(&mut room.dt[..l * l], l, false, self.mat(&room.du, v), self.mat(u, v).t(), -one, false);
        self.of_rows(d_o, dv, d_rate, d_log, room);
        self.of_pairs(d_rate, d_log, room);
        // dQ += dqk K, dK += dqk^T Q + (dkk + dkk^T) K
        let (da, dt) = (self.mat(&room.da, l), self.mat(&room.dt, l));
        gemm(dq, k, true, da, self.mat(self.k, k), one, false);
        gemm(dk, k, true, da.t(), self.mat(self.q, k), one, false);
        gemm(dk, k, true, dt, self.mat(self.k, k), one, false);
        gemm(dk, k, true, dt.t(), self.mat(self.k, k), one, false);
        // through O and X: dQ += exp(G) dO S^T, dK -= exp(G) dX S^T; `qs` and `dx` hold the scaled rows
        let (qs, dx) = (self.mat(&room.qs, v), self.mat(&room.dx, v));
        gemm(dq, k, true, qs, state.t(), one, false);
        gemm(dk, k, true, dx, state.t(), -one, false);
        // dS = exp(G_l) dS' + Q^T (exp(G) dO) - K^T (exp(G) dX)
        let decay = self.last();
        ds.iter_mut().for_each(|s| *s *= decay);
        gemm(ds, v, true, self.mat(self.q, k).t(), qs, one, false);
        gemm(ds, v, true, self.mat(self.k, k).t(), dx, -one, false);
    }

    /// Gradients through the rows of O and X: of values, rates and decays. Replaces `Q S` by `exp(G) dO`, and writes
    /// `exp(G) dX` to `dx`.
    fn of_rows(
        &self,
        d_o: (&[T], usize),
        dv: (&mut [T], usize),
        d_rate: &mut [T],
        d_log: &mut [T],
        room: &mut Room<T>,
    ) {
        let (l, v) = (self.sizes.l, self.sizes.v);
        for i in 0..l {
            let (decay, rate) = (self.cum[i].exp(), self.rate[i]);
            let own = i * v..(i + 1) * v;
            let (value, g) = (&self.v.0[i * self.v.1..][..v], &d_o.0[i * d_o.1..][..v]);
            let (dr, ks) = (&room.du[own.clone()], &room.ks[own.clone()]);
            let (qs, dx) = (&mut room.qs[own.clone()], &mut room.dx[own]);
            let through_o = dot(g, qs);
            vectorised(|| {
                dx.iter_mut().zip(value).zip(ks).for_each(|((x, v), ks)| *x = *v - decay * *ks);
            });
            d_rate[i] = dot(dr, dx);
            d_log[i] += decay * (through_o - rate * dot(dr, ks));
            let dv = &mut dv.0[i * dv.1..][..v];
            vectorised(|| {
                dv.iter_mut().zip(dr).for_each(|(dv, dr)| *dv = rate * *dr);
                dx.iter_mut().zip(dr).for_each(|(dx, dr)| *dx = decay * rate * *dr);
                qs.iter_mut().zip(g).for_each(|(qs, g)| *qs = decay * *g);
            });
        }
    }

    /// Turns dA and dT into the gradients of `q_i . k_j` and `k_i . k_j`; adds those of rates and decays.
    fn of_pairs(&self, d_rate: &mut [T], d_log: &mut [T], room: &mut Room<T>) {
        let l = self.sizes.l;
        for i in 0..l {
            let own = i * l..(i + 1) * l;
            let (d, a, t) = (&room.d[own.clone()], &room.a[own.clone()], &room.t[own.clone()]);
            let (da, dt) = (&mut room.da[own.clone()], &mut room.dt[own.clone()]);
            let (kk, rate) = (&self.kk[own], self.rate[i]);
            let (before, rest) = d_log.split_at_mut(i);
            vectorised(|| {
                let mut all = T::zero();
                for j in 0..i {
                    let moved = da[j] * a[j] + dt[j] * t[j];
                    before[j] -= moved;
                    all += moved;
                }
                rest[0] += all;
                let mut of_rate = T::zero();
                for j in 0..i {
                    of_rate += dt[j] * d[j] * kk[j];
                    da[j] *= d[j];
                    dt[j] *= rate * d[j];
                }
                d_rate[i] += of_rate;
            });
            da[i + 1..].fill(T::zero());
            dt[i..].fill(T::zero());
        }
    }
}

/// Gradients of a chunk, see [`Chunk::backward`].
pub struct Gradients<'a, T> {
    pub ds: &'a mut [T],
    pub dq: &'a mut [T],
    pub dk: &'a mut [T],
    pub dv: (&'a mut [T], usize),
    pub d_rate: &'a mut [T],
    pub d_log: &'a mut [T],
}

/// Solves `(1 + T) Y = X`, or with `transposed` `(1 + T)^T Y = X`, in place; T `[l, l]` is strictly lower triangular, X
/// `[l, v]`.
fn solve<T: Float>(t: &[T], x: &mut [T], l: usize, v: usize, transposed: bool) {
    let blocks = l.div_ceil(ROWS);
    for n in 0..blocks {
        let block = if transposed { blocks - 1 - n } else { n };
        let (from, to) = (block * ROWS, ((block + 1) * ROWS).min(l));
        let (before, rest) = x.split_at_mut(from * v);
        let (own, after) = rest.split_at_mut((to - from) * v);
        if transposed && to < l {
            // own -= T[to.., own]^T Y[to..]
            let lower = Mat::new(&t[to * l + from..], l - to, to - from, l).t();
            gemm(own, v, true, lower, Mat::new(&*after, l - to, v, v), -T::one(), false);
        } else if !transposed && from > 0 {
            let left = Mat::new(&t[from * l..], to - from, from, l);
            gemm(own, v, true, left, Mat::new(&*before, from, v, v), -T::one(), false);
        }
        let rows = to - from;
        for step in 0..rows {
            let i = if transposed { rows - 1 - step } else { step };
            let others = if transposed { i + 1..rows } else { 0..i };
            for j in others {
                let (row, col) = if transposed { (j, i) } else { (i, j) };
                let factor = t[(from + row) * l + from + col];
                let (low, high) = own.split_at_mut(i.max(j) * v);
                let (a, b) = if i < j {
                    (&mut low[i * v..][..v], &high[..v])
                } else {
                    (&mut high[..v], &low[j * v..][..v])
                };
                vectorised(|| a.iter_mut().zip(b).for_each(|(a, b)| *a -= factor * *b));
            }
        }
    }
}
