//! delta_rule.cu compiled for the host, compared with the CPU implementation; see `kernel::cuda::host_tests`.

use super::cuda::{of_gradients, of_walk};
use super::tests::{CASES, Case, Values, heads, inputs, of};
use super::*;
use crate::attention::CHUNK;
use crate::check::{distance, values};
use crate::cuda::host_tests::{Argument, Served, Watched};
use candle_core::{DType, Device};

fn bytes(t: &Tensor) -> Vec<u8> {
    let v: Vec<f32> = t.flatten_all().and_then(|t| t.to_vec1()).expect("floats");
    v.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Splits an answer into f32 values of these counts.
fn parts<const N: usize>(answer: &[u8], counts: [usize; N]) -> [Vec<f64>; N] {
    let all: Vec<f64> = answer.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    let mut at = 0;
    counts.map(|n| {
        at += n;
        all[at - n..at].to_vec()
    })
}

fn near(what: &str, got: &[f64], want: &Tensor) {
    let apart = distance(got, &values(want));
    assert!(apart < 2e-5, "{what}: {apart:e} apart");
}

/// Forward with and without states, and the gradients, with the documents of each case.
#[test]
#[ignore = "needs a C++ compiler; .ci/run runs it"]
fn the_delta_rule_on_the_host_is_that_of_the_cpu() -> Result<()> {
    for how in [Watched::Bounds, Watched::Accesses] {
        let mut host = Served::new("crates/ft-kernels/src/delta/rule/delta_rule.cu", how);
        // channels of several warps and slices, neither of them whole
        let wide = Case { docs: &[40], heads: heads(1, 2, 102, 45) };
        for case in CASES.iter().chain([&wide]) {
            let (h, Values(x, seqs, d_o)) = (case.heads, inputs(case, DType::F32)?);
            let (want, back) =
                (forward(&of(h, x.each_ref()), &seqs, None)?, backward(&of(h, x.each_ref()), &d_o, &seqs)?);
            let t = case.docs.iter().sum::<usize>();
            let (mut list, mut begin, mut chunks) = (Vec::new(), 0usize, 0usize);
            for n in case.docs {
                list.extend([begin, begin + n, chunks, 0].map(|n| n as u32).map(u32::to_le_bytes).concat());
                (begin, chunks) = (begin + n, chunks + n.div_ceil(CHUNK));
            }
            let data = x.each_ref().map(bytes);
            let d_o = bytes(&d_o);
            let begin_with = || data.iter().map(|d| Argument::In(d, 0)).chain([Argument::In(&list, 0)]);
            let sizes = |first: usize| {
                [first, h.keys, h.values, h.key_dim, h.value_dim].map(|n| Argument::from(n as u32))
            };
            let (states, outputs) = (chunks * h.state(), t * h.value_width());
            let grid = [case.docs.len(), h.values, h.value_dim.div_ceil(32)];
            let mut all: Vec<_> = begin_with().collect();
            // the state of a single document goes on
            let one = case.docs.len() == 1;
            all.extend([Argument::Null, if one { Argument::Out(4 * h.state()) } else { Argument::Null }]);
            all.extend([Argument::Out(4 * states), Argument::Out(4 * outputs)]);
            all.extend(sizes(t));
            let answer = host.launch("delta_rule_forward_f32", grid, of_walk(h.key_dim), &all);
            let after = if one { h.state() } else { 0 };
            let [_, before, o] = parts(&answer, [after, states, outputs]);
            near("o", &o, &want);
            let mut all: Vec<_> = begin_with().collect();
            all.extend([Argument::In(&d_o, 0), Argument::Out(4 * states)]);
            all.extend(sizes(t));
            let after = host.launch("delta_rule_states_f32", grid, of_walk(h.key_dim), &all);
            let before: Vec<u8> = before.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
            let mut all: Vec<_> = begin_with().collect();
            all.extend([Argument::In(&d_o, 0), Argument::In(&before, 0), Argument::In(&after, 0)]);
            let counts = [t * h.channels(), t * h.values, t * h.values, chunks * h.values, chunks * h.values];
            all.extend(counts.map(|n| Argument::Out(4 * n)));
            all.extend(sizes(case.docs.len()));
            let grid = [chunks, h.keys, 1];
            let answer = host.launch("delta_rule_gradients_f32", grid, of_gradients(h.key_dim), &all);
            let [qkv, a, b, a_log, bias] = parts(&answer, counts);
            near("qkv", &qkv, &back.qkv);
            near("a", &a, &back.a);
            near("b", &b, &back.b);
            let sums = |p: &[f64]| -> Result<Tensor> {
                let p = Tensor::from_vec(p.to_vec(), (chunks, h.values), &Device::Cpu)?;
                p.sum_keepdim(0)
            };
            near("a_log", &values(&sums(&a_log)?), &back.a_log);
            near("bias", &values(&sums(&bias)?), &back.bias);
        }
        host.finish();
    }
    Ok(())
}
