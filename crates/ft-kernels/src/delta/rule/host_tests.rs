//! delta_rule.cu compiled for the host, compared with the CPU implementation; see `kernel::cuda::host_tests`.

use super::cuda::{FLOATS, SLICE, of_chunks, of_gradients, of_states, of_walk};
use super::tests::{CASES, Case, Values, heads, inputs, of};
use super::*;
use crate::attention::CHUNK;
use crate::check::{distance, values};
use crate::cuda::host_tests::{Argument, Served, Watched, bytes, tensor};
use candle_core::{DType, Device};

/// Values of an answer of the kernels.
fn of_bytes(answer: &[u8], dtype: DType) -> Result<Vec<f64>> {
    Ok(values(&tensor(answer, answer.len() / dtype.size_in_bytes(), dtype)?))
}

/// Splits an answer after these counts of bytes.
fn parts<const N: usize>(mut answer: &[u8], counts: [usize; N]) -> [&[u8]; N] {
    counts.map(|n| {
        let (own, rest) = answer.split_at(n);
        answer = rest;
        own
    })
}

/// Answers of the kernels: outputs; gradients of queries, keys and values, of a and b; by chunk those of `a_log` and of
/// the bias.
fn answers(
    host: &mut Served,
    case: &Case,
    dtype: DType,
    x: &[Tensor; 5],
    d_o: &Tensor,
) -> Result<[Vec<f64>; 6]> {
    let (h, width, f32s) = (case.heads, dtype.size_in_bytes(), DType::F32);
    let t = case.docs.iter().sum::<usize>();
    let (mut list, mut begin, mut chunks) = (Vec::new(), 0usize, 0usize);
    for n in case.docs {
        list.extend([begin, begin + n, chunks, 0].map(|n| n as u32).map(u32::to_le_bytes).concat());
        (begin, chunks) = (begin + n, chunks + n.div_ceil(CHUNK));
    }
    let dtypes = [dtype, dtype, dtype, f32s, f32s];
    let in_dtype = |t: &Tensor, dtype| bytes(&t.to_dtype(dtype)?);
    let data = x.iter().zip(dtypes).map(|(t, dtype)| in_dtype(t, dtype)).collect::<Result<Vec<_>>>()?;
    let d_o = in_dtype(d_o, dtype)?;
    let input = |i: usize| Argument::In(&data[i], 0);
    let sizes = || [h.keys, h.values, h.key_dim, h.value_dim].map(|n| Argument::from(n as u32));
    let (list, tokens) = (|| Argument::In(&list, 0), || Argument::from(t as u32));
    let count = || Argument::from(case.docs.len() as u32);
    let (states, rows) = (width * chunks * of_states(h), width * t * h.value_width());
    let by_chunk = [chunks, h.keys, 1];
    let mut launch = |kernel: &str, grid, shared, all: &[Argument<'_>]| {
        let suffix = dtype.as_str();
        host.launch(&format!("delta_rule_{kernel}_{suffix}"), grid, shared, all)
    };
    // a single document needs no list, and its state goes on
    let one = case.docs.len() == 1;
    let documents = || if one { Argument::Null } else { list() };
    let mut all: Vec<_> = (0..5).map(input).chain([documents(), count()]).collect();
    all.extend([Argument::Out(4 * chunks * h.values * FLOATS), tokens()]);
    all.extend(sizes());
    let products = launch("chunks", by_chunk, of_chunks(width), &all);
    let walk = [case.docs.len(), h.values, h.value_dim.div_ceil(SLICE)];
    let after = if one { 4 * h.state() } else { 0 };
    let walked = || [input(0), documents(), Argument::In(&products, 0), Argument::Null];
    let state = if one { Argument::Out(after) } else { Argument::Null };
    let out = [state, Argument::Null, Argument::Null, Argument::Out(rows), tokens()];
    let all: Vec<_> = walked().into_iter().chain(out).chain(sizes()).collect();
    let answer = launch("forward", walk, of_walk(width), &all);
    let o = of_bytes(&answer[after..], dtype)?;
    let out = [Argument::Null, Argument::Out(states), Argument::Out(rows), Argument::Null, tokens()];
    let all: Vec<_> = walked().into_iter().chain(out).chain(sizes()).collect();
    let answer = launch("forward", walk, of_walk(width), &all);
    let [before, u] = parts(&answer, [states, rows]);
    let all = [input(0), list(), Argument::In(&products, 0), Argument::In(&d_o, 0)];
    let of_qkv = width * t * h.channels();
    let out = [states, rows, of_qkv].map(Argument::Out);
    let all: Vec<_> = all.into_iter().chain(out).chain([tokens()]).chain(sizes()).collect();
    let answer = launch("states", walk, of_walk(width), &all);
    let [d_states, d_rows, of_values] = parts(&answer, [states, rows, of_qkv]);
    let mut all = vec![input(0), input(1), input(3), input(4), list(), count()];
    let read = [&products[..], &d_o, before, d_states, u, d_rows];
    all.extend(read.map(|x| Argument::In(x, 0)));
    let (of_head, sums) = (width * t * h.values, 4 * chunks * h.values);
    let out = [of_qkv, of_head, of_head, sums, sums];
    all.extend(out.map(Argument::Out));
    all.extend(sizes());
    let answer = launch("gradients", by_chunk, of_gradients(width), &all);
    let [qkv, a, b, a_log, bias] = parts(&answer, out);
    // gradients of values come from the walk
    let (mut qkv, of_values) = (of_bytes(qkv, dtype)?, of_bytes(of_values, dtype)?);
    let at = 2 * h.key_width();
    for (row, from) in qkv.chunks_mut(h.channels()).zip(of_values.chunks(h.channels())) {
        row[at..].copy_from_slice(&from[at..]);
    }
    Ok([o, qkv, of_bytes(a, dtype)?, of_bytes(b, dtype)?, of_bytes(a_log, f32s)?, of_bytes(bias, f32s)?])
}

/// What a case has beside random inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum With {
    Nothing,
    /// A zero key, of which the inverse length is the largest.
    ZeroKey,
    /// A zero key with large values, for the outputs alone.
    LargeValues,
}

fn compare(host: &mut Served, case: &Case, dtype: DType, with: With) -> Result<()> {
    let (h, Values(mut x, seqs, d_o)) = (case.heads, inputs(case, DType::F32)?);
    if with != With::Nothing {
        let mut rows: Vec<Vec<f32>> = x[0].to_vec2()?;
        // the last token of a chunk, which does not decay before the next one
        let row = &mut rows[case.docs[0] + CHUNK - 1][h.key_width()..];
        row[..h.key_width()].fill(0.0);
        if with == With::LargeValues {
            row[h.key_width()..].fill(5000.0);
        }
        x[0] = Tensor::new(rows, &Device::Cpu)?;
    }
    let rounded = |t: &Tensor| t.to_dtype(dtype)?.to_dtype(DType::F32);
    let [qkv, a, b, a_log, bias] = &x;
    let (x, d_o) = ([rounded(qkv)?, rounded(a)?, rounded(b)?, a_log.clone(), bias.clone()], rounded(&d_o)?);
    let (want, back) =
        (forward(&of(h, x.each_ref()), &seqs, None)?, backward(&of(h, x.each_ref()), &d_o, &seqs)?);
    let near = |what: &str, got: &[f64], want: &Tensor| {
        let bar = if dtype == DType::F32 { 2e-5 } else { 8e-3 };
        let apart = distance(got, &values(want));
        assert!(apart < bar, "{what} of {dtype:?} with {with:?}: {apart:e} apart");
    };
    let [o, qkv, a, b, a_log, bias] = answers(host, case, dtype, &x, &d_o)?;
    near("o", &o, &want);
    if with == With::LargeValues {
        return Ok(());
    }
    near("qkv", &qkv, &back.qkv);
    near("a", &a, &back.a);
    near("b", &b, &back.b);
    let sums = |p: Vec<f64>| -> Result<Vec<f64>> {
        let chunks = p.len() / h.values;
        Ok(values(&Tensor::from_vec(p, (chunks, h.values), &Device::Cpu)?.sum_keepdim(0)?))
    };
    near("a_log", &sums(a_log)?, &back.a_log);
    near("bias", &sums(bias)?, &back.bias);
    Ok(())
}

/// Loss scaling sees gradients beyond the range of f16: those of right sides and those of pairs of tokens.
fn overflow(host: &mut Served) -> Result<()> {
    let (t, h) = (5, heads(1, 1, 2, 3));
    let case = Case { docs: &[5], heads: h };
    let all = |x: f32, columns: usize| Tensor::full(x, (t, columns), &Device::Cpu);
    // equal queries and keys, no decay, rates of 1/2
    let qkv = Tensor::cat(&[all(1.0, 2 * h.key_width())?, all(5.0, h.value_width())?], 1)?;
    let zero = Tensor::full(0f32, h.values, &Device::Cpu)?;
    let x = [qkv, all(-20.0, h.values)?, all(0.0, h.values)?, zero.clone(), zero];
    let [_, got, ..] = answers(host, &case, DType::F16, &x, &all(60_000.0, h.value_width())?)?;
    for (what, of) in [("queries", 0..h.key_width()), ("values", 2 * h.key_width()..h.channels())] {
        let hidden = got.chunks(h.channels()).all(|row| row[of.clone()].iter().all(|x| x.is_finite()));
        assert!(!hidden, "gradients of {what} are finite: {got:?}");
    }
    Ok(())
}

/// Gradients stay finite in f16 where outputs do, with a state and rows of U beyond its range.
fn large_state(host: &mut Served) -> Result<()> {
    let (t, h) = (40, heads(1, 1, 2, 3));
    let case = Case { docs: &[40], heads: h };
    // Keys (1, 0) and (1, 1) in turn, with opposite values; no decay, rates of 1. Queries are (1, 0).
    let row = |i: usize| match i % 2 {
        0 => [1f32, 0.0, 1.0, 0.0, 6e4, 6e4, 6e4],
        _ => [1.0, 0.0, 1.0, 1.0, -6e4, -6e4, -6e4],
    };
    let qkv = Tensor::from_vec((0..t).flat_map(row).collect(), (t, h.channels()), &Device::Cpu)?;
    let all = |x: f32, columns: usize| Tensor::full(x, (t, columns), &Device::Cpu);
    let zero = Tensor::full(0f32, h.values, &Device::Cpu)?;
    let x = [qkv, all(-20.0, h.values)?, all(20.0, h.values)?, zero.clone(), zero];
    let of = answers(host, &case, DType::F16, &x, &all(1e-5, h.value_width())?)?;
    for (name, of) in ["o", "qkv", "a", "b", "a_log", "bias"].into_iter().zip(of) {
        assert!(of.iter().all(|x| x.is_finite()), "{name}: {of:?}");
    }
    Ok(())
}

/// Rows of whole vectors and others, channels of several warps and slices, whole and not.
#[test]
#[ignore = "needs a C++ compiler; .ci/run runs it"]
fn the_delta_rule_on_the_host_is_that_of_the_cpu() -> Result<()> {
    for how in [Watched::Bounds, Watched::Accesses] {
        let mut host = Served::new("crates/ft-kernels/src/delta/rule/delta_rule.cu", how);
        let wide = Case { docs: &[40], heads: heads(1, 2, 102, 45) };
        for case in CASES.iter().chain([&wide]) {
            compare(&mut host, case, DType::F32, With::Nothing)?;
        }
        // a stage of the walks is used again from the third chunk on
        let whole = Case { docs: &[3, 70], heads: heads(1, 2, 24, 40) };
        compare(&mut host, &CASES[2], DType::BF16, With::Nothing)?;
        compare(&mut host, &whole, DType::BF16, With::Nothing)?;
        for with in [With::Nothing, With::ZeroKey, With::LargeValues] {
            compare(&mut host, &whole, DType::F16, with)?;
        }
        overflow(&mut host)?;
        large_state(&mut host)?;
        host.finish();
    }
    Ok(())
}
