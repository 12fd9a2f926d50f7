//! Recompute levels change no bit.

use super::*;

/// Loss and gradients of a step with NEFTune noise, dropout and router losses; layer inputs on the host.
fn bits(d: &Decoder, p: &Params, batch: &Batch, recompute: Recomputed) -> Result<(u64, Vec<Vec<f64>>)> {
    let losses = match d.config.moe {
        Some(_) => RouterLosses { aux: 0.01, z: 0.001 },
        None => RouterLosses::default(),
    };
    let inputs = Inputs { on_host: recompute.norms > 0, pin: false };
    let how = Execution { recompute, inputs, ..Execution::plain(1, d.config.vocab, false) };
    let mut walk = Walk::chosen(d, p.lowest_unit(), &how).router_losses(losses).neftune(5.0);
    let (sums, _) = train(&mut walk, p, batch, 1.0)?;
    Ok((loss::total(&sums)?.to_bits(), gradients(p)?))
}

/// Dense models and mixtures of experts with every kind of norm, bias and window; full
/// training, LoRA and DoRA; dense and 4-bit bases; training attention only, feed-forward only,
/// and either with norms and routers.
#[test]
fn no_level_changes_a_bit() -> Result<()> {
    let mut compared = 0;
    for c in &cases()? {
        let rows = Rows::packed(c)?;
        let batch = rows.batch_at(&c.config, Some((3, 5)))?;
        let (attention, feed_forward) = (&[Group::Attention][..], &[Group::Mlp, Group::Experts][..]);
        let both = [attention, feed_forward].concat();
        let lora = |dora| adapters(&c.config, dora, &both);
        let is_norm = |m: &Module| matches!(m.group, Group::Norms | Group::Router);
        let norms = in_full(adapters(&c.config, false, feed_forward), is_norm);
        for (kind, base, selection) in [
            ("in full", c.base.clone(), everything(&c.config)),
            ("LoRA", c.base.clone(), lora(false)),
            ("DoRA", c.base.clone(), lora(true)),
            ("LoRA on NF4", c.nf4(), lora(false)),
            ("DoRA on NF4", c.nf4(), lora(true)),
            ("attention", c.base.clone(), adapters(&c.config, false, attention)),
            ("feed-forward", c.base.clone(), adapters(&c.config, false, feed_forward)),
            ("feed-forward on NF4 beside norms", c.nf4(), norms),
        ] {
            let (d, p) = build(&base, &selection, None)?;
            let none = bits(&d, &p, &batch, 0.into())?;
            let mixed = Recomputed { all: 1, feed_forward: 1, norms: usize::MAX };
            for recompute in [NORMS, FEED_FORWARD, mixed, usize::MAX.into()] {
                assert!(bits(&d, &p, &batch, recompute)? == none, "{}, {kind}: {recompute:?}", c.name());
            }
            compared += 1;
        }
    }
    assert!(compared >= 90, "only {compared}");
    Ok(())
}
