// Head norms and rotary embedding, forward and backward, compared with float64: aligned and unaligned
// heads, more heads than a warp handles at once, and warps without tokens.
#include "../../crates/ft-kernels/src/layers/rope/rope.cu"
#include "call.h"

struct Rotation {
  uint32_t tokens, heads, kv_heads, c, per;
  uint32_t rotated = 0; // channels, if not all
};
static const std::vector<Rotation> CASES = {
    {9, 5, 2, 128, 4},     {3, 2, 1, 96, 4},  {2, 3, 3, 10, 4},  {5, 1, 2, 256, 5},   {13, 4, 2, 16, 8},
    {5, 2, 1, 256, 4, 64}, {5, 2, 1, 512, 3}, {2, 1, 2, 262, 2}, {3, 2, 2, 12, 2, 4}, {2, 1, 1, 10, 2, 6}};

struct Part2 {
  std::vector<double> y, dx, dw;
};

// Reference for queries or keys: forward (with a norm if w is set) and backward.
static Part2 reference(const std::vector<double> &x, const std::vector<double> *w, const std::vector<double> &cos,
                       const std::vector<double> &sin, const std::vector<double> &dy, const Rotation &r, uint32_t heads,
                       double eps) {
  const uint32_t turned = r.rotated ? r.rotated : r.c, half = turned / 2;
  Part2 out = {std::vector<double>(x.size()), std::vector<double>(x.size()), std::vector<double>(r.c)};
  for (uint32_t t = 0; t < r.tokens; t++)
    for (uint32_t h = 0; h < heads; h++) {
      const size_t at = (static_cast<size_t>(t) * heads + h) * r.c;
      double squares = 0, dots = 0;
      std::vector<double> g(r.c);
      for (uint32_t i = 0; i < half; i++) {
        const double c = cos[t * half + i], s = sin[t * half + i];
        g[i] = dy[at + i] * c + dy[at + half + i] * s, g[half + i] = dy[at + half + i] * c - dy[at + i] * s;
      }
      for (uint32_t i = turned; i < r.c; i++) g[i] = dy[at + i];
      for (uint32_t i = 0; i < r.c; i++) squares += x[at + i] * x[at + i], dots += w ? g[i] * (*w)[i] * x[at + i] : 0;
      const double k = w ? 1 / sqrt(squares / r.c + eps) : 1, f = w ? dots * k * k * k / r.c : 0;
      for (uint32_t i = 0; i < half; i++) {
        const double c = cos[t * half + i], s = sin[t * half + i];
        const double a = x[at + i] * k * (w ? (*w)[i] : 1), b = x[at + half + i] * k * (w ? (*w)[half + i] : 1);
        out.y[at + i] = a * c - b * s, out.y[at + half + i] = b * c + a * s;
      }
      for (uint32_t i = turned; i < r.c; i++) out.y[at + i] = x[at + i] * k * (w ? (*w)[i] : 1);
      for (uint32_t i = 0; i < r.c; i++) {
        out.dx[at + i] = g[i] * (w ? (*w)[i] : 1) * k - x[at + i] * f;
        out.dw[i] += g[i] * x[at + i] * k;
      }
    }
  return out;
}

template <typename T> static void rotations(const std::string &type) {
  unsigned seed = 1;
  for (const Rotation &r : CASES)
    for (bool norms : {false, true}) {
      const uint32_t half = r.c / 2, rotated = r.rotated ? r.rotated / 2 : half, lanes = [&] {
        uint32_t n = 1;
        while (n * (r.c > 256 ? 8 : PACK) < half) n *= 2;
        return n;
      }();
      const std::string kind = (r.c > 256 ? "wide_" : "") + type;
      const size_t nq = static_cast<size_t>(r.tokens) * r.heads * r.c,
                   nk = static_cast<size_t>(r.tokens) * r.kv_heads * r.c;
      std::vector<float> angles = check::randn<float>(static_cast<size_t>(r.tokens) * rotated, seed++), cosines, sines;
      for (float a : angles) cosines.push_back(std::cos(a)), sines.push_back(std::sin(a));
      host::Buffer<float> cos(cosines), sin(sines);
      host::Buffer<T> q(check::randn<T>(nq, seed++)), k(check::randn<T>(nk, seed++)), wq(check::randn<T>(r.c, seed++)),
          wk(check::randn<T>(r.c, seed++)), dyq(check::randn<T>(nq, seed++)), dyk(check::randn<T>(nk, seed++)), yq(nq),
          yk(nk);
      // gradients of queries in padded rows
      const uint32_t wide = r.heads * r.c, far = wide + (norms ? 8 : 3), narrow = r.kv_heads * r.c;
      host::Buffer<T> dq(static_cast<size_t>(r.tokens) * far), dk(nk);
      const std::vector<double> cs = values(cos), ss = values(sin);
      // weights stored as w - 1, where a part of the channels rotates
      const float plus = r.rotated ? 1.0f : 0.0f;
      std::vector<double> wqs = values(wq), wks = values(wk);
      for (double &w : wqs) w += plus;
      for (double &w : wks) w += plus;
      const float eq = 1e-3f, ek = 2e-3f;
      const Part2 rq = reference(values(q), norms ? &wqs : nullptr, cs, ss, values(dyq), r, r.heads, eq);
      const Part2 rk = reference(values(k), norms ? &wks : nullptr, cs, ss, values(dyk), r, r.kv_heads, ek);
      T *no = nullptr;
      float *none = nullptr;
      const Dim tokens = grid((r.tokens + WARPS - 1) / WARPS, 2);
      call("rope_forward_" + kind, tokens, WARPS * WARP, q.at(), k.at(), norms ? wq.at() : no, norms ? wk.at() : no,
           cos.at(), sin.at(), yq.at(), yk.at(), r.tokens, r.heads, r.kv_heads, half, rotated, lanes, 1.0f, eq, ek,
           wide, narrow, plus);
      check::close("q", yq, rq.y, check::BAR<T>), check::close("k", yk, rk.y, check::BAR<T>);
      if (!norms) {
        call("rope_forward_" + kind, tokens, WARPS * WARP, dyq.at(), dyk.at(), no, no, cos.at(), sin.at(), dq.at(),
             dk.at(), r.tokens, r.heads, r.kv_heads, half, rotated, lanes, -1.0f, eq, ek, far, narrow, plus);
        check::close("dq", compact(dq, wide, far), rq.dx, check::BAR<T>), check::close("dk", dk, rk.dx, check::BAR<T>);
        continue;
      }
      const size_t blocks = (r.tokens + r.per - 1) / r.per;
      host::Buffer<float> partial(2 * blocks * r.c);
      for (bool weights : {false, true}) {
        call("rope_backward_" + kind, grid(blocks, 2), WARPS * WARP, q.at(), k.at(), wq.at(), wk.at(), cos.at(),
             sin.at(), dyq.at(), dyk.at(), dq.at(), dk.at(), weights ? partial.at() : none, r.tokens, r.heads,
             r.kv_heads, half, rotated, lanes, r.per, eq, ek, far, narrow, plus);
        check::close("dq", compact(dq, wide, far), rq.dx, check::BAR<T>), check::close("dk", dk, rk.dx, check::BAR<T>);
      }
      for (size_t of : {0, 1}) {
        host::Buffer<float> dw(r.c);
        for (uint32_t i = 0; i < r.c; i++) {
          double sum = 0;
          for (size_t b = 0; b < blocks; b++) sum += partial[(of * blocks + b) * r.c + i];
          dw[i] = static_cast<float>(sum);
        }
        check::close("dw", dw, of ? rk.dw : rq.dw, 1e-5);
      }
    }
}

TEST(rotations_in_f32) { rotations<float>("f32"); }
TEST(rotations_in_bf16) { rotations<bf16>("bf16"); }
TEST(rotations_in_f16) { rotations<f16>("f16"); }
