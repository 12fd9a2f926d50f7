//! Whole models with composed operations, used on CUDA without a kernel of our own: against PyTorch and
//! against the CPU kernels.

use super::*;
use ft_kernels::check::composed;

/// Composed operations sum in another order.
const APART: f64 = 1e-5;

#[test]
fn composed_operations_have_pytorchs_gradients_in_full() -> Result<()> {
    for c in &cases()? {
        let expected = c.open("expected.safetensors")?;
        let (padded, packed) = (Rows::padded(c)?, Rows::packed(c)?);
        composed(|| {
            let (d, p) = c.build(&everything(&c.config), None)?;
            let n = compare(&c.name(), &d, &p, &padded, &expected, "")?;
            assert_eq!(n, p.tensors.len(), "{}", c.name());
            compare(&c.name(), &d, &p, &packed, &expected, "packed.").map(drop)
        })?;
    }
    Ok(())
}

#[test]
fn composed_operations_have_pytorchs_gradients_of_adapters() -> Result<()> {
    for c in &cases()? {
        for prefix in c.adapters()? {
            let what = format!("{} {prefix}adapter", c.name());
            let (init, selection) = c.adapter(&format!("{prefix}adapter_init"))?;
            let rows = Rows::padded(c)?;
            let expected = c.open(&format!("{prefix}lora_expected.safetensors"))?;
            let (n, all) = composed(|| {
                let (d, p) = c.build(&selection, Some(&init))?;
                Ok::<_, anyhow::Error>((compare(&what, &d, &p, &rows, &expected, "")?, p.tensors.len()))
            })?;
            assert_eq!(n, all, "{what}");
        }
    }
    Ok(())
}

/// Compares every gradient of composed operations with the CPU kernels; returns the largest distance.
fn beside(what: &str, base: &Base, selection: &Selection, rows: &Rows) -> Result<f64> {
    let mut worst = 0f64;
    let (d, p) = build(base, selection, None)?;
    let (e, q) = composed(|| build(base, selection, None))?;
    // seed 3 and step 5 give both runs the same dropout
    let batch = rows.batch_at(&base.config, Some((3, 5)))?;
    let losses = match base.config.moe {
        Some(_) => RouterLosses { aux: 0.01, z: 0.001 },
        None => RouterLosses::default(),
    };
    for (recompute, dequantize, head_rows) in [
        (0.into(), Dequantize::PerMatmul, 4096),
        (1.into(), Dequantize::PerLayer, 17),
        (FEED_FORWARD, Dequantize::PerLayer, 64),
        (usize::MAX.into(), Dequantize::PerMatmul, 64),
    ] {
        let how = Execution { micro_rows: 1, recompute, inputs: Inputs::default(), dequantize, head_rows };
        let (loss, ours) = step(&d, &p, &batch, &how, losses)?;
        let (also, theirs) = composed(|| step(&e, &q, &batch, &how, losses))?;
        assert!((loss - also).abs() <= 1e-6 * loss, "{what}: loss {loss} and {also}");
        for ((t, a), b) in p.tensors.iter().zip(&ours).zip(&theirs) {
            let apart = distance(b, a);
            let bar = if t.name.ends_with("k_proj.bias") { 10.0 * APART } else { APART };
            assert!(apart <= bar, "{what}: gradient of {} is {apart:.1e} apart, {how:?}", t.name);
            worst = worst.max(apart);
        }
    }
    Ok(worst)
}

/// Dense models and mixtures of experts; full training, LoRA and DoRA with dropout; dense and 4-bit bases;
/// with and without recompute.
#[test]
fn composed_operations_have_the_gradients_of_the_cpus_kernels() -> Result<()> {
    let (mut worst, mut compared) = (0f64, 0);
    for c in &cases()? {
        let rows = Rows::packed(c)?;
        let lora = |dora| adapters(&c.config, dora, &[Group::Attention, Group::Mlp, Group::Experts]);
        let routers = in_full(lora(false), |m| {
            matches!(m.group, Group::Norms | Group::Router | Group::Embedding | Group::Head)
        });
        for (kind, base, selection) in [
            ("in full", c.base.clone(), everything(&c.config)),
            ("LoRA", c.base.clone(), lora(false)),
            ("DoRA", c.base.clone(), lora(true)),
            ("LoRA on NF4", c.nf4(), lora(false)),
            ("DoRA on NF4", c.nf4(), lora(true)),
            ("LoRA on NF4 beside routers and ends in full", c.nf4(), routers),
        ] {
            worst = worst.max(beside(&format!("{}, {kind}", c.name()), &base, &selection, &rows)?);
            compared += 1;
        }
    }
    println!("{compared} models, the worst gradient is {worst:.1e} apart");
    assert!(compared >= 60, "only {compared}");
    Ok(())
}
