//! Families with linear attention, fused experts, or 8-bit weights: `tests/fixtures/families`, `tests/fixtures/fp8`.

use super::*;
use crate::adapters::{Part, Trained};

/// The values of an expert's tensor within that of all experts, if the file has that; `prefix` begins the names.
pub(super) fn slice_of_whole(files: &TensorFiles, t: &Trained, prefix: &str) -> Result<Option<Vec<f64>>> {
    let get = |name: &str| Ok::<_, anyhow::Error>(files.tensor(name, DType::F32, CPU)?);
    if let (Some(fused), Some(slice)) = (&t.fused, t.fused.as_ref().and_then(|f| f.parameter.slice.as_ref()))
    {
        let name = format!("{prefix}base_model.model.{}", fused.name(t.part));
        let whole = get(&name)?;
        let own = if t.part == Part::A {
            whole.reshape((slice.experts, t.shape[0], t.shape[1]))?.get(fused.expert)?
        } else {
            let by_expert = whole.reshape((slice.rows, t.shape[1], slice.experts))?;
            by_expert.narrow(2, fused.expert, 1)?.squeeze(2)?.narrow(0, slice.first, t.shape[0])?
        };
        return Ok(Some(values(&own.contiguous()?.into())));
    }
    let Some((block, rest)) = t.name.split_once(".experts.") else { return Ok(None) };
    let Some((expert, last)) = rest.split_once('.') else { return Ok(None) };
    if let Some(own) = of_joint(files, t, &format!("{prefix}{block}.experts"), (expert.parse()?, last))? {
        return Ok(Some(own));
    }
    let (parameter, first) = match last {
        "gate_proj.weight" => ("gate_up_proj", 0),
        "up_proj.weight" => ("gate_up_proj", t.shape[0]),
        "down_proj.weight" => ("down_proj", 0),
        _ => return Ok(None),
    };
    let name = format!("{prefix}{block}.experts.{parameter}");
    if files.info(&name).is_none() {
        return Ok(None);
    }
    let own = get(&name)?.get(expert.parse()?)?.narrow(0, first, t.shape[0])?;
    Ok(Some(values(&own.contiguous()?.into())))
}

/// As [`slice_of_whole`], for experts with gate and up in one matrix; those with biases are transposed in the file.
fn of_joint(
    files: &TensorFiles,
    t: &Trained,
    block: &str,
    (expert, last): (usize, &str),
) -> Result<Option<Vec<f64>>> {
    let Some((parameter, part)) = last.split_once('.') else { return Ok(None) };
    let name = format!("{block}.{parameter}{}", if part == "bias" { "_bias" } else { "" });
    let transposed = files.info(&format!("{block}.down_proj_bias")).is_some();
    if files.info(&name).is_none() || !(transposed || parameter == "gate_up_proj") {
        return Ok(None);
    }
    let own = files.tensor(&name, DType::F32, CPU)?.get(expert)?;
    let own = if transposed && part != "bias" { own.t()?.contiguous()? } else { own };
    assert_eq!(own.elem_count(), t.elements(), "{name}");
    Ok(Some(values(&own.into())))
}

fn families() -> Result<Vec<Case>> {
    Ok(cases()?.into_iter().filter(|c| c.dir.parent().is_some_and(|p| p.ends_with("families"))).collect())
}

/// Loss and gradient norm of rows whose documents PyTorch computed one by one: nothing leaks from one into the next,
/// also across the chunks of long ones.
#[test]
fn packed_documents_are_as_if_alone() -> Result<()> {
    let mut compared = 0;
    for c in &families()? {
        let expected = c.open("expected.safetensors")?;
        for prefix in ["packed.", "long."] {
            if expected.info(&format!("{prefix}loss")).is_none() {
                continue;
            }
            let (d, p) = c.build(&everything(&c.config), None)?;
            let batch = Rows::of_documents(c, prefix)?.batch(&c.config)?;
            let (loss, _) = backward(&d, &p, &batch, 0)?;
            let number = |n: &str| -> Result<f64> {
                Ok(values(&expected.tensor(&format!("{prefix}{n}"), DType::F32, CPU)?.into())[0])
            };
            let what = format!("{} {prefix}", c.name());
            assert!((loss / number("loss")? - 1.0).abs() < 1e-6, "{what}: loss {loss}");
            let squares: f64 = p.grads().iter().flatten().flat_map(values).map(|g| g * g).sum();
            let apart = squares.sqrt() / number("grad_norm")? - 1.0;
            assert!(apart.abs() < 1e-5, "{what}: the norm is {apart:e} apart");
            compared += 1;
        }
    }
    assert!(compared >= 4, "only {compared}");
    Ok(())
}

/// Codes times scales, to the bit, whole and by slices; and PyTorch's logits on them.
#[test]
fn eight_bit_weights_are_codes_times_scales() -> Result<()> {
    let dir = fixtures().join("fp8");
    let c = Case::of(&dir, &dir.join("model"))?;
    c.base.check()?;
    let (files, expected) = (c.files()?, c.open("expected.safetensors")?);
    let mut compared = 0;
    for name in expected.names().filter_map(|n| n.strip_prefix("dequantized.")) {
        let want = expected.tensor(&format!("dequantized.{name}"), DType::F32, CPU)?;
        let want: Vec<f32> = want.flatten_all()?.to_vec1()?;
        let read = |r: std::ops::Range<usize>| -> Result<Vec<f32>> {
            Ok(files.part(name, r, DType::F32, CPU)?.to_vec1()?)
        };
        assert_eq!(read(0..want.len())?, want, "{name}");
        let slice = want.len() / 3..want.len() / 2 + 7;
        assert_eq!(read(slice.clone())?, want[slice], "{name}");
        compared += 1;
    }
    assert!(compared >= 2);
    let (d, _) = c.build(&Selection::frozen(&c.config), None)?;
    let rows = Rows::padded(&c)?;
    let apart = logits_apart(&d, &rows, &expected, "logits")?;
    assert!(apart <= BAR, "{apart:e} apart");
    // straight to 4 bits
    let (four, _) = c.build_nf4(&Selection::frozen(&c.config))?;
    let apart = logits_apart(&four, &rows, &expected, "logits")?;
    assert!(apart > BAR && apart < 0.3, "{apart:e} apart");
    Ok(())
}

/// A scale that no weight uses, or a weight without a scale, is an error that names it.
#[test]
fn a_scale_without_a_weight_and_a_weight_without_a_scale_are_named() -> Result<()> {
    let model = fixtures().join("fp8/model");
    let mut raw: Map<String, serde_json::Value> =
        serde_json::from_str(&std::fs::read_to_string(model.join("config.json"))?)?;
    for (block, without, words) in [
        (Some([128, 128]), false, None),
        (Some([64, 128]), false, Some("_scale_inv: unexpected")),
        (None, true, Some("F8_E4M3 in the file")),
    ] {
        match block {
            Some(block) => raw["quantization_config"]["weight_block_size"] = serde_json::json!(block),
            None => drop(raw.remove("quantization_config")),
        }
        let config = Config::parse("config.json", raw.clone())?;
        let checked = Base::open(config, &model)?.check();
        match words {
            None => checked?,
            Some(words) => {
                let e = checked.err().context("an error")?.to_string();
                assert!(e.contains(words) && (!without || e.contains("unexpected")), "{e}");
            }
        }
    }
    Ok(())
}

/// MXFP4 read as values, at once and by parts: those of transformers to the bit, with its logits; trained in full, and
/// quantized to NF4.
#[test]
fn mxfp4_weights_are_read_as_values() -> Result<()> {
    let dir = fixtures().join("families/gpt-oss/mxfp4");
    let table = serde_json::json!({"quantization_config": {"quant_method": "mxfp4", "dequantize": true}});
    let overrides = table.as_object().cloned().context("a table")?;
    let config = Config::load(&dir.join("model"), &overrides)?;
    let base = Base::open(config.clone(), &dir.join("model"))?;
    base.check()?;
    let c = Case { dir: fixtures().join("families/gpt-oss"), config, base };
    let expected = TensorFiles::open_file(&dir.join("expected.safetensors"))?;
    let (d, p) = c.build(&everything(&c.config), None)?;
    let (files, mut compared) = (c.base.files().context("files")?, 0);
    for (m, l) in d.linears().into_iter().filter(|(m, _)| m.layer == Some(0) && m.group == Group::Experts) {
        let parameter = m.parameter.as_ref().context("a fused parameter")?;
        let whole = expected.tensor(&format!("dequantized.{}", parameter.name), DType::F32, CPU)?;
        let want = values(&whole.get(m.expert.context("an expert")?)?.t()?.contiguous()?.into());
        assert_eq!(values(&l.weight.rows(0..m.rows())?), want, "{}", m.name);
        let part = 3..want.len() - 5;
        let read = files.part(&m.weight_name(), part.clone(), DType::F32, CPU)?;
        assert_eq!(values(&read.into()), want[part], "{}", m.name);
        compared += 1;
    }
    assert_eq!(compared, 8);
    let rows = Rows::padded(&c)?;
    assert!(logits_apart(&d, &rows, &expected, "logits")? <= BAR);
    assert!(backward(&d, &p, &rows.batch(&c.config)?, 0)?.1.iter().all(|reached| *reached));
    let (four, _) = c.build_nf4(&Selection::frozen(&c.config))?;
    assert!(four.linears().iter().any(|(m, l)| m.expert.is_some() && matches!(l.weight, Weight::Nf4(_))));
    let apart = logits_apart(&four, &rows, &expected, "logits")?;
    assert!(apart > BAR && apart < 0.3, "{apart:e} apart");
    Ok(())
}

/// MXFP4 as released: transformers' dequantized values to the bit, its logits, and its logits with an adapter.
#[test]
fn mxfp4_weights_and_logits_are_those_of_transformers() -> Result<()> {
    let dir = fixtures().join("families/gpt-oss/mxfp4");
    let c = Case::of(&dir, &dir.join("model"))?;
    c.base.check()?;
    let expected = c.open("expected.safetensors")?;
    let (d, _) = c.build(&Selection::frozen(&c.config), None)?;
    let mut compared = 0;
    for (m, l) in d.linears().into_iter().filter(|(m, _)| m.layer == Some(0) && m.group == Group::Experts) {
        let parameter = m.parameter.as_ref().context("a fused parameter")?;
        let whole = expected.tensor(&format!("dequantized.{}", parameter.name), DType::F32, CPU)?;
        let want = whole.get(m.expert.context("an expert")?)?.t()?.contiguous()?;
        assert!(matches!(l.weight, Weight::Nf4(_)), "{}", m.name);
        assert_eq!(values(&l.weight.rows(0..m.rows())?), values(&want.into()), "{}", m.name);
        compared += 1;
    }
    assert_eq!(compared, 8);
    let rows = Rows::padded(&case("gpt-oss")?)?;
    assert!(logits_apart(&d, &rows, &expected, "logits")? <= BAR);
    let (init, selection) = c.adapter("adapter_init")?;
    let (d, p) = c.build(&selection, Some(&init))?;
    let expected = c.open("lora_expected.safetensors")?;
    assert_eq!(compare("mxfp4", &d, &p, &rows, &expected, "")?, p.tensors.len());
    Ok(())
}
