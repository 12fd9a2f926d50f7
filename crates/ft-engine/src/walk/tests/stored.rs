//! Half-precision bases: a model with f32 compute keeps the matrices in half precision.

use super::*;
use crate::adapters::Part;
use crate::files::write_file;

/// The weights of a case, rounded to `half`, in a file of `dtype`.
fn rounded(c: &Case, half: DType, dtype: DType, folder: &std::path::Path) -> Result<Base> {
    let files = c.files()?;
    let names: Vec<String> = files.names().map(String::from).collect();
    let tensor = |name: String| -> Result<_> {
        let t = files.tensor(&name, half, CPU)?.to_dtype(dtype)?;
        Ok((name, t))
    };
    let tensors = names.into_iter().map(tensor).collect::<Result<Vec<_>>>()?;
    write_file(&folder.join("model.safetensors"), &tensors, &[])?;
    Ok(Base::open(c.config.clone(), folder)?)
}

/// Bytes and number of values of a decoder's linear modules and table.
fn bytes(d: &Decoder) -> Result<(usize, usize)> {
    let (mut bytes, mut values) = (0, 0);
    let table = Weight::Dense(d.embedding.table.clone());
    for w in d.linears().iter().map(|(_, l)| &l.weight).chain([&table]) {
        if let Weight::Dense(w) = w {
            (bytes, values) = (bytes + w.elem_count() * w.dtype().size_in_bytes(), values + w.elem_count());
        }
    }
    Ok((bytes, values))
}

/// LoRA and DoRA, experts and routers, in bf16 and f16: matrices take two bytes per value, and loss, logits
/// and every gradient have the bits of a run on the same values in f32.
#[test]
fn a_base_in_half_precision_trains_as_the_same_values_in_f32() -> Result<()> {
    let (mut seen, mut dora) = (0, 0);
    for c in cases()? {
        for (prefix, half) in c.adapters()?.into_iter().zip([DType::BF16, DType::F16].into_iter().cycle()) {
            let what = format!("{} {prefix}{half:?}", c.name());
            let (adapter, selection) = c.adapter(&format!("{prefix}adapter_init"))?;
            let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
            let bases = [
                rounded(&c, half, half, folders[0].path())?,
                rounded(&c, half, DType::F32, folders[1].path())?,
            ];
            let batch = Rows::padded(&c)?.batch(&c.config)?;
            let mut ends = Vec::new();
            for base in &bases {
                let (d, p) = build(base, &selection, Some(&adapter))?;
                let (loss, _) = backward(&d, &p, &batch, 1)?;
                let grads = gradients(&p)?;
                let logits = values(&Walk::new(&d, None, 0).logits(&batch)?);
                ends.push((loss, logits, grads));
                let (bytes, values) = bytes(&d)?;
                let full = selection.modules.iter().filter(|(_, c)| matches!(c, Choice::Full { .. })).count();
                match base.frozen_dtype(&selection.modules[0].0, DType::F32, CPU) {
                    DType::F32 => assert_eq!(bytes, 4 * values, "{what}"),
                    _ if full == 0 => assert_eq!(bytes, 2 * values, "{what}"),
                    _ => assert!(bytes < 4 * values, "{what}"),
                }
            }
            assert!(ends[0] == ends[1], "{what}");
            seen += 1;
            dora += usize::from(selection.trained().iter().any(|t| t.part == Part::Magnitude));
        }
    }
    assert!(seen >= 12 && dora > 0, "{seen} {dora}");
    Ok(())
}
