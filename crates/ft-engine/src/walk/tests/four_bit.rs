//! 4-bit bases: against PyTorch on weights dequantized by bitsandbytes, against dense
//! runs, and from several quantizers.

use super::*;
use crate::files::write_file;
use crate::load::quantize;
use crate::model::WeightFormat;
use crate::quant;
use crate::quant::MergeCost;
use ft_kernels::check::{close, randn};
use ft_kernels::dispatch::Groups;
use ft_kernels::{Real, gemm, upcast};
use std::sync::Arc;

/// Cases of `tests/fixtures/nf4` with the folders of their 4-bit models.
fn four_bit_cases() -> Result<Vec<(Case, PathBuf)>> {
    let mut out = Vec::new();
    for c in cases()? {
        let dir = fixtures().join("nf4").join(c.name());
        if dir.is_dir() {
            out.push((Case::of(&c.dir, &dir.join("model"))?, dir));
        }
    }
    assert!(out.len() >= 5, "only {} cases", out.len());
    Ok(out)
}

/// Number of 4-bit linear modules of a model, including experts.
fn four_bit_count(config: &Config) -> usize {
    modules(config).iter().filter(|m| quant::applies_to(m)).count()
}

/// The dequantized values of all 4-bit linear modules.
fn dequantized(d: &Decoder) -> Result<Vec<(String, Tensor)>> {
    let mut out = Vec::new();
    for (m, l) in d.linears() {
        if let Weight::Nf4(w) = &l.weight {
            out.push((m.name, w.dequantize()?));
        }
    }
    Ok(out)
}

/// LoRA, rsLoRA and DoRA on linear modules, experts and routers.
#[test]
fn adapters_on_4_bit_bases_have_pytorchs_gradients() -> Result<()> {
    for (c, dir) in four_bit_cases()? {
        let (adapter, selection) = c.adapter("adapter_init")?;
        let (d, p) = c.build(&selection, Some(&adapter))?;
        assert_eq!(dequantized(&d)?.len(), four_bit_count(&c.config), "{}", c.name());
        let expected = TensorFiles::open_file(&dir.join("lora_expected.safetensors"))?;
        let n = compare(&c.name(), &d, &p, &Rows::padded(&c)?, &expected, "")?;
        assert_eq!(n, p.tensors.len(), "{}", c.name());
    }
    Ok(())
}

/// A dense f32 model with the dequantized values of the 4-bit linear modules.
fn dense_of(c: &Case, d: &Decoder, folder: &Path) -> Result<Case> {
    let mut tensors: Vec<(String, ft_kernels::Real)> = Vec::new();
    let coded: Vec<(String, Tensor)> = dequantized(d)?;
    for m in modules(&c.config).into_iter().chain(constants(&c.config)) {
        let weight = m.weight_name();
        match coded.iter().find(|(n, _)| *n == m.name) {
            Some((_, w)) => tensors.push((weight, w.real()?.clone())),
            _ if c.files()?.info(&weight).is_some() => {
                tensors.push((weight.clone(), c.files()?.tensor(&weight, DType::F32, CPU)?));
            }
            _ => {}
        }
        let bias = format!("{}.bias", m.name);
        if m.bias().is_some() {
            tensors.push((bias.clone(), c.files()?.tensor(&bias, DType::F32, CPU)?));
        }
    }
    write_file(&folder.join("model.safetensors"), &tensors, &[])?;
    let files = TensorFiles::open_model(folder)?;
    let config = Config { format: WeightFormat::Values, ..c.config.clone() };
    let base = Base::of_files(config.clone(), files);
    Ok(Case { dir: c.dir.clone(), config, base })
}

/// Loss and every LoRA gradient on a 4-bit base match the dense model of the dequantized values: dense models
/// and mixtures of experts, 4-bit on disk or quantized on load, packed documents as well.
///
/// Not bit for bit: a dense product passes the whole matrix to gemm, a 4-bit product passes dequantized
/// tiles, and the summation order of gemm depends on the sizes. Cancellation makes the difference visible,
/// for instance in the gradients of keys. Nine of ten gradients have equal bits; the test prints the largest
/// distance, about 3e-6. (Dequantized tiles and tiles read from a dequantized matrix have equal bits:
/// `kernel::dequantized`.)
#[test]
fn a_4_bit_base_trains_like_a_dense_one_of_the_dequantized_weights() -> Result<()> {
    let mut bases: Vec<(Case, bool)> = four_bit_cases()?.into_iter().map(|(c, _)| (c, false)).collect();
    for c in cases()? {
        if c.adapters()?.iter().any(String::is_empty) {
            bases.push((c, true));
        }
    }
    assert!(bases.len() >= 12, "only {} cases", bases.len());
    let (mut worst, mut unequal, mut all) = ((0f64, String::new()), 0, 0);
    for (c, quantize) in &bases {
        let (adapter, selection) = c.adapter("adapter_init")?;
        let (d, p) = build(&c.base.clone().in_nf4(*quantize), &selection, Some(&adapter))?;
        assert_eq!(dequantized(&d)?.len(), four_bit_count(&c.config), "{}", c.name());
        let folder = tempfile::tempdir()?;
        let dense = dense_of(c, &d, folder.path())?;
        let (e, q) = dense.build(&selection, Some(&adapter))?;
        assert!(dequantized(&e)?.is_empty());
        for rows in [Rows::padded(c)?, Rows::packed(c)?] {
            let batch = rows.batch(&c.config)?;
            let (ours, _) = backward(&d, &p, &batch, 1)?;
            let (theirs, _) = backward(&e, &q, &batch, 1)?;
            assert!((ours - theirs).abs() <= 1e-6 * theirs, "{}: {ours} {theirs}", c.name());
            for (i, t) in p.tensors.iter().enumerate() {
                let (ours, theirs) = (gradient(&p, i)?, gradient(&q, i)?);
                let apart = if ours == theirs { 0.0 } else { distance(&ours, &theirs) };
                let what = format!("{} {}", c.name(), t.name);
                assert!(apart <= BAR, "{what}: {apart:.1e}");
                (unequal, all) = (unequal + usize::from(apart > 0.0), all + 1);
                if apart > worst.0 {
                    worst = (apart, what);
                }
            }
        }
    }
    println!(
        "{unequal} of {all} gradients are not bit-equal; the worst is {:.1e} apart: {}",
        worst.0, worst.1
    );
    Ok(())
}

/// Number of 4-bit matrices; asserts that none is currently dequantized.
fn none_is_dequantized(d: &Decoder) -> usize {
    let mut seen = 0;
    for (m, l) in d.linears() {
        if let Weight::Nf4(w) = &l.weight {
            assert_eq!(Arc::strong_count(w), 1, "{} is still dequantized", m.name);
            seen += 1;
        }
    }
    seen
}

/// The mixtures of experts, quantized on load.
fn mixtures() -> Result<Vec<Case>> {
    let all: Vec<Case> = cases()?.into_iter().filter(|c| c.config.moe.is_some()).collect();
    assert!(all.len() >= 2, "only {} mixtures", all.len());
    Ok(all)
}

/// Every execution gives the same bits and leaves no dequantized matrix behind, for dense
/// models and mixtures of experts.
#[test]
fn no_choice_of_the_plan_changes_a_bit() -> Result<()> {
    for c in four_bit_cases()?.into_iter().map(|c| c.0).chain(mixtures()?) {
        let selection = adapters(&c.config, false, &[Group::Attention, Group::Mlp, Group::Experts]);
        let (d, p) = c.build_nf4(&selection)?;
        let batch = Rows::padded(&c)?.batch(&c.config)?;
        let mut first: Option<(Vec<f64>, Vec<Vec<f64>>)> = None;
        let mixed = Recomputed { all: 1, feed_forward: 1, norms: usize::MAX };
        for recompute in [0.into(), 1.into(), c.config.layers.into(), FEED_FORWARD, NORMS, mixed] {
            for dequantize in [Dequantize::PerMatmul, Dequantize::PerLayer] {
                for head_rows in [16, 17, usize::MAX] {
                    let inputs = Inputs::default();
                    let execution = Execution { micro_rows: 1, recompute, inputs, dequantize, head_rows };
                    let mut watch = |_, _| {
                        none_is_dequantized(&d);
                    };
                    let walk = Walk::chosen(&d, p.lowest_unit(), &execution);
                    let (losses, _) = train(&mut walk.watched(&mut watch), &p, &batch, 1.0)?;
                    assert!(none_is_dequantized(&d) > 0);
                    let losses: Vec<f64> = losses.iter().flat_map(values).collect();
                    let this = (losses, gradients(&p)?);
                    let what = format!("{}: {execution:?}", c.name());
                    assert!(*first.get_or_insert_with(|| this.clone()) == this, "{what}");
                }
            }
        }
    }
    Ok(())
}

/// In a mixture of experts, experts without tokens are not dequantized.
#[test]
fn experts_without_tokens_are_not_dequantized() -> Result<()> {
    let mut seen = 0;
    for c in mixtures()? {
        let frozen = Selection::frozen(&c.config);
        let (d, _) = c.build_nf4(&frozen)?;
        for layer in d.layers.iter().filter(|l| l.is_packed()) {
            let Some(m) = layer.mlp.mixture() else { continue };
            // route all tokens to the last expert
            let last = m.experts().len() - 1;
            let groups = Groups::new(vec![last as u32; 3], 1, m.experts().len(), CPU)?;
            let visited = layer.dequantized(Level::Full, Some(&groups))?;
            let whole = |l: &Linear| matches!(l.weight, Weight::Dequantized(_));
            assert!(visited.attn.linears().into_iter().all(whole));
            assert!(!layer.attn.linears().into_iter().any(whole));
            let Some(of_visit) = visited.mlp.mixture() else { continue };
            for (e, expert) in of_visit.experts().iter().enumerate() {
                assert!(expert.linears().into_iter().all(|l| whole(l) == (e == last)), "expert {e}");
                seen += 1;
            }
            assert!(visited.is_packed() && layer.dequantized(Level::Full, None).is_err());
        }
    }
    assert!(seen > 0);
    Ok(())
}

/// Quantization on load, by `ft quantize` and by bitsandbytes gives the same model.
#[test]
fn a_model_is_quantized_in_several_ways_to_the_same_bits() -> Result<()> {
    let bits = |d: &Decoder| -> Result<Vec<(String, Vec<f64>)>> {
        Ok(dequantized(d)?.into_iter().map(|(n, t)| (n, values(&t))).collect())
    };
    for name in ["qwen3-one-kv", "qwen2-bias", "llama-yarn", "mixtral", "qwen3-moe", "mixtral-fused"] {
        let c = case(name)?;
        let frozen = Selection::frozen(&c.config);
        let (d, _) = c.build_nf4(&frozen)?;
        let loading = bits(&d)?;
        assert_eq!(loading.len(), four_bit_count(&c.config));
        let folder = tempfile::tempdir()?;
        let out = folder.path().join("four-bit");
        let report = quantize(&c.config, &c.dir.join("model"), &out, true)?;
        assert_eq!(report.linears, loading.len());
        let written = Case::of(&out, &out)?;
        assert!(written.config.is_bitsandbytes());
        let (e, _) = written.build(&frozen, None)?;
        assert!(bits(&e)? == loading, "{name}");
        // other tensors are unchanged, and a 4-bit model is not quantized again
        let embedding = |c: &Case| -> Result<Vec<u8>> { Ok(c.files()?.read("model.embed_tokens.weight")?) };
        assert!(embedding(&c)? == embedding(&written)?);
        let (again, _) = written.build_nf4(&frozen)?;
        assert!(bits(&again)? == loading, "{name}");
        assert!(quantize(&written.config, &out, &folder.path().join("twice"), true).is_err());
        assert!(quantize(&c.config, &c.dir.join("model"), &out, true).is_err(), "over what is there");
        assert!(!folder.path().join("twice").exists());
    }
    Ok(())
}

/// Memory of 4-bit tensors matches the computed size of codes and scales.
#[test]
fn a_quantized_model_takes_its_bits_and_no_more() -> Result<()> {
    let c = case("qwen2-bias")?;
    let frozen = Selection::frozen(&c.config);
    for base in [c.nf4(), Base::random(c.config.clone(), 7).in_nf4(true)] {
        let (d, _) = build(&base, &frozen, None)?;
        for (m, l) in d.linears() {
            match &l.weight {
                Weight::Nf4(w) => {
                    let (n, blocks) = (w.dims().0 * w.dims().1, (w.dims().0 * w.dims().1).div_ceil(64));
                    assert_eq!(w.bytes(), n.div_ceil(2) + blocks + 4 * blocks.div_ceil(256), "{}", m.name);
                }
                Weight::Dense(_) | Weight::Padded(_) | Weight::Dequantized(_) | Weight::Fp8(_) => {
                    assert_eq!(m.name, "lm_head")
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_4_bit_weight_does_not_train_in_full() -> Result<()> {
    let (c, _) = four_bit_cases()?.pop().context("a case")?;
    let mut s = Selection::frozen(&c.config);
    let last = s.modules.iter_mut().rfind(|(m, _)| m.group == Group::Mlp).context("a linear")?;
    last.1 = Choice::Full { lr_scale: 1.0 };
    let name = last.0.name.clone();
    let error = c.build(&s, None).err().context("it was built")?.to_string();
    assert!(error.starts_with(&format!("{name}: its weight is 4-bit and cannot train in full")), "{error}");
    // the original weights can train, and so can modules that are not 4-bit
    let dense = case(&c.name())?;
    assert!(dense.build(&s, None).is_ok());
    assert!(dense.build_nf4(&s).is_ok());
    let s = in_full(Selection::frozen(&c.config), |m| m.group == Group::Norms);
    let (d, p) = c.build(&s, None)?;
    let (_, reached) = backward(&d, &p, &Rows::padded(&c)?.batch(&c.config)?, 0)?;
    assert!(reached.iter().all(|r| *r));
    Ok(())
}

/// Merged weight `[o, i]` of a linear module with an adapter, in f32, and the base
/// weight; `None` without an adapter.
fn merged(linear: &Linear) -> Result<Option<(Real, Real)>> {
    let Some(lora) = &linear.lora else { return Ok(None) };
    let base = upcast(&linear.weight.rows(0..linear.weight.dims()?.0)?)?;
    let product = gemm::matmul(&upcast(&lora.b)?, false, &upcast(&lora.a)?, false)?;
    let mut merged = (&base + (product * lora.scale)?)?;
    if let Some(dora) = &lora.dora {
        let norms = lora.norms(&linear.weight, &dora.row_squares)?;
        let g = (upcast(&dora.magnitude)?.flatten_all()? / norms)?;
        merged = merged.broadcast_mul(&g.unsqueeze(1)?)?;
    }
    Ok(Some((merged.real()?.clone(), base.real()?.clone())))
}

/// The merged weight matches the linear module, and the losses reported have the order of the formats: bf16
/// has 8 bits of precision, NF4 errs by about a tenth.
#[test]
fn merging_reports_what_it_loses() -> Result<()> {
    for (c, _) in four_bit_cases()? {
        let (adapter, selection) = c.adapter("adapter_init")?;
        let (d, _) = c.build(&selection, Some(&adapter))?;
        let batch = Rows::padded(&c)?.batch(&c.config)?;
        let mut all = MergeCost::default();
        for (m, l) in d.linears() {
            let Some((w, before)) = merged(l)? else { continue };
            let x = randn(3, (5, w.dims()[1]), DType::F32)?;
            let (mut y, _) = l.forward(&x, &batch.context)?;
            if let Some(b) = &l.bias {
                y = y.broadcast_sub(b)?;
            }
            close(&y, &x.matmul(&w.t()?.into())?, 1e-5);
            let cost = MergeCost::of(&m.name, &w, &before)?;
            let [bf16, nf4] = [cost.bf16, cost.nf4].map(|error| (error / cost.merged).sqrt());
            assert!((1e-4..4e-3).contains(&bf16), "{} {cost:?}", m.name);
            assert!((0.02..0.15).contains(&nf4), "{} {cost:?}", m.name);
            assert!(cost.nf4 > cost.bf16 && cost.update > 0.0);
            all = all.plus(cost);
        }
        assert!(all.nf4_of_update() > all.bf16_of_update() && all.merged > all.update, "{all:?}");
    }
    Ok(())
}

/// 4-bit codes of other weights are detected, even from the same model a few steps later.
#[test]
fn nf4_codes_agree_only_with_the_weights_they_encode() -> Result<()> {
    for (c, _) in four_bit_cases()? {
        let original = case(&c.name())?;
        let folder = tempfile::tempdir()?;
        let mut tuned = Vec::new();
        for m in modules(&c.config).into_iter().filter(quant::applies_to) {
            let name = format!("{}.weight", m.name);
            let &[o, i] = m.weight_shape().as_slice() else { continue };
            let same = quant::agreement(c.files()?, original.files()?, &name, (o, i))?;
            assert!(same > 0.999, "{} {name}: {same}", c.name());
            let w = original.files()?.tensor(&name, DType::F32, CPU)?;
            let spread = (w.sqr()?.mean_all()?.to_scalar::<f32>()? as f64).sqrt();
            tuned.push((name, (w + (randn(9, (o, i), DType::F32)? * (0.05 * spread))?.real()?)?));
        }
        write_file(&folder.path().join("model.safetensors"), &tuned, &[])?;
        let files = TensorFiles::open_model(folder.path())?;
        for (name, w) in &tuned {
            let same = quant::agreement(c.files()?, &files, name, w.dims2()?)?;
            assert!(same < 0.95, "{} {name}: {same}", c.name());
        }
    }
    Ok(())
}
