//! Full training of some tensors with a 4-bit base: against PyTorch on weights dequantized by bitsandbytes.

use super::*;
use crate::load::quantize;
use crate::quant;

/// Cases of `tests/fixtures/nf4-full`: the model, the folder, and the tensors trained in full.
fn cases_in_full() -> Result<Vec<(Case, PathBuf, Selection)>> {
    let mut out = Vec::new();
    for c in cases()? {
        let dir = fixtures().join("nf4-full").join(c.name());
        if !dir.is_dir() {
            continue;
        }
        let log: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("trajectory.json"))?)?;
        let trains: Vec<&str> =
            log["trains"].as_array().into_iter().flatten().filter_map(|t| t.as_str()).collect();
        let s = in_full(Selection::frozen(&c.config), |m| trains.contains(&m.weight_name().as_str()));
        let mut ours: Vec<String> = s.trained().into_iter().map(|t| t.name).collect();
        ours.sort();
        let mut theirs: Vec<String> = trains.iter().map(|t| t.to_string()).collect();
        theirs.sort();
        assert_eq!(ours, theirs, "{}", c.name());
        out.push((c, dir, s));
    }
    assert!(out.len() >= 5, "only {} cases", out.len());
    Ok(out)
}

/// Every linear module of the decoder except routers and trained modules is 4-bit, and the gradients match
/// PyTorch. With the copy made by `model.cache`, and with optimizer offload, the bits are the same.
#[test]
fn tensors_in_full_stay_dense_beside_a_4_bit_base() -> Result<()> {
    for (c, dir, s) in cases_in_full()? {
        let (d, p) = c.build_nf4(&s)?;
        for (m, l) in d.linears() {
            let choice = s.modules.iter().find(|(n, _)| n.name == m.name).map(|(_, c)| c);
            let four_bit = matches!(l.weight, Weight::Nf4(_));
            assert_eq!(
                four_bit,
                quant::applies_to(&m) && choice == Some(&Choice::Freeze),
                "{} {}",
                c.name(),
                m.name
            );
        }
        let expected = TensorFiles::open_file(&dir.join("expected.safetensors"))?;
        let rows = Rows::padded(&c)?;
        assert_eq!(compare(&c.name(), &d, &p, &rows, &expected, "")?, p.tensors.len(), "{}", c.name());

        let batch = rows.batch(&c.config)?;
        let (loss, _) = backward(&d, &p, &batch, usize::MAX)?;
        let want = gradients(&p)?;
        let folder = tempfile::tempdir()?;
        let out = folder.path().join("four-bit");
        quantize(&c.config, &c.dir.join("model"), &out, true)?;
        let copy = Base::open(Config::load(&out, &Map::new())?, &out)?;
        let cached = c.nf4().with_copy(copy.config.clone(), TensorFiles::open_model(&out)?);
        let (nf4, allocate) = (c.nf4(), Allocate { train: true, offload: true, ..Allocate::default() });
        for (what, built) in [
            ("cached", build(&cached, &s, None)),
            ("offloaded", Ok(Build { allocate, ..Build::new(&nf4, &s) }.run()?)),
        ] {
            let (d, p) = built?;
            assert_eq!(backward(&d, &p, &batch, 0)?.0, loss, "{} {what}", c.name());
            assert!(gradients(&p)? == want, "{} {what}", c.name());
        }
        // the copy alone has no dense weights to train
        let alone = build(&copy, &s, None);
        let is_linear = |(m, c): &&(_, Choice)| quant::applies_to(m) && *c != Choice::Freeze;
        let first = s.modules.iter().find(is_linear).context("a linear")?;
        let error = alone.err().context("it was built")?.to_string();
        assert!(
            error.starts_with(&format!("{}: its weight is 4-bit and cannot train in full", first.0.name)),
            "{error}"
        );
        assert!(error.contains("original weights"), "{error}");
    }
    Ok(())
}

/// If every linear module of the decoder trains in full, `model.quantize` has nothing to quantize: an error.
#[test]
fn nothing_left_to_quantize_is_an_error() -> Result<()> {
    let c = case("mixtral")?;
    let mut s = everything(&c.config);
    let nf4 = c.nf4();
    let error = Build::new(&nf4, &s).run().err().context("it was built")?;
    assert!(error.to_string().contains("nothing is left to quantize"), "{error}");
    assert_eq!(error.exit_code(), ft_base::ExitCode::Usage);
    let one = modules(&c.config).iter().position(quant::applies_to).context("a linear")?;
    s.modules[one].1 = Choice::Freeze;
    let (d, _) = c.build_nf4(&s)?;
    assert!(
        d.linears()
            .iter()
            .any(|(m, l)| m.name == s.modules[one].0.name && matches!(l.weight, Weight::Nf4(_)))
    );
    Ok(())
}
