//! Comparison with files written by bitsandbytes, and malformed files.

use super::*;
use crate::files::{TensorFiles, write_file};
use anyhow::{Context as _, Result};
use candle_core::{DType, Device, Tensor};
use ft_kernels::quantized::dynamic_map;
use std::path::Path;

const CPU: &Device = &Device::Cpu;

fn fixture() -> Result<TensorFiles> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/nf4/matrices.safetensors");
    Ok(TensorFiles::open_file(Path::new(path))?)
}

fn names(files: &TensorFiles) -> Vec<String> {
    files.names().filter_map(|n| n.strip_suffix(".original").map(String::from)).collect()
}

fn dims(files: &TensorFiles, name: &str) -> Result<(usize, usize)> {
    let shape = &files.get(&format!("{name}.original"))?.shape;
    Ok((shape[0], shape[1]))
}

fn floats(t: &Tensor) -> Result<Vec<f32>> {
    Ok(t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

/// Asserts equal bits, and reports the number of differences.
#[track_caller]
fn same(what: &str, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "{what}");
    let differ: Vec<_> = a.iter().zip(b).filter(|(x, y)| x.to_bits() != y.to_bits()).collect();
    assert!(differ.is_empty(), "{what}: {} of {} differ, first {:?}", differ.len(), a.len(), differ[0]);
}

#[test]
fn bitsandbytes_bytes_decode_to_its_bits() -> Result<()> {
    let files = fixture()?;
    let names = names(&files);
    assert!(names.len() >= 12, "{names:?}");
    for name in names {
        let mut books = CodeTables::new(CPU)?;
        let weight = format!("{name}.weight");
        let w = read(&files, &weight, dims(&files, &name)?, DType::F32, &mut books)?;
        let want = files.tensor(&format!("{name}.dequantized"), DType::F32, CPU)?;
        same(&name, &floats(w.dequantize()?.real()?)?, &floats(&want)?);
        assert!(problems(&files, &weight, dims(&files, &name)?).is_none());
    }
    Ok(())
}

/// Codes and scales equal those of bitsandbytes bit for bit. Double quantization starts from a mean, summed
/// by torch in f32 in another order: offset and factors may differ in the last digits, and codes at ties.
#[test]
fn encoding_gives_bitsandbytes_bytes() -> Result<()> {
    let files = fixture()?;
    let mut compared = 0;
    for name in names(&files) {
        if name.starts_with("fp4") || name == "blocks_of_128" {
            continue;
        }
        let weight = format!("{name}.weight");
        let e = from_files(&files, &format!("{name}.original"))?;
        assert_eq!(e.packed, files.read(&weight)?, "{name}: codes");
        assert_eq!(bits(&scales(&files, &format!("{name}.original"))?.scales), bits(&e.scales), "{name}");
        let values = floats(&files.tensor(&format!("{name}.original"), DType::F32, CPU)?)?;
        let at_once = Encoded::new(&name, &values, e.dims, e.source)?;
        assert_eq!((&at_once.packed, bits(&at_once.scales)), (&e.packed, bits(&e.scales)), "{name}");
        let absmax = format!("{weight}.absmax");
        if files.info(&format!("{weight}.nested_absmax")).is_none() {
            assert_eq!(bits(&e.scales), bits(&floats(&files.tensor(&absmax, DType::F32, CPU)?)?), "{name}");
        } else {
            let n = Nested::new(&e.scales);
            let theirs = floats(&files.tensor(&format!("{weight}.nested_absmax"), DType::F32, CPU)?)?;
            assert!(
                n.absmax.iter().zip(&theirs).all(|(a, b)| (a - b).abs() <= 2e-7 * (b + n.offset)),
                "{name}"
            );
            let codes = files.read(&absmax)?;
            let differ = n.codes.iter().zip(&codes).filter(|(a, b)| a != b).count();
            assert!(differ * 200 <= codes.len(), "{name}: {differ} of {} nested codes differ", codes.len());
            assert!(n.codes.iter().zip(&codes).all(|(a, b)| a.abs_diff(*b) <= 1), "{name}");
            let map = floats(&files.tensor(&format!("{weight}.nested_quant_map"), DType::F32, CPU)?)?;
            same(&name, &map, &dynamic_map(true));
        }
        compared += 1;
    }
    assert!(compared >= 9);
    Ok(())
}

/// Tensors of a weight, as written to a file.
fn tensors(double: bool) -> Result<Vec<(String, Tensor)>> {
    let files = fixture()?;
    let name = "groups_bf16.original";
    let e = from_files(&files, name)?;
    entries("w", e.dims, e.source, &e.scales, double)?
        .into_iter()
        .map(|p| {
            let value = match p.value {
                Some(v) => v,
                None => Tensor::from_vec(e.packed.clone(), p.shape.as_slice(), CPU)?,
            };
            assert_eq!((value.dims(), value.dtype()), (p.shape.as_slice(), p.dtype));
            Ok((p.name, value))
        })
        .collect()
}

fn written(tensors: &[(String, Tensor)]) -> Result<(tempfile::TempDir, TensorFiles)> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.safetensors");
    write_file(&path, tensors, &[])?;
    let files = TensorFiles::open_file(&path)?;
    Ok((dir, files))
}

#[test]
fn a_quantized_matrix_is_read_back_as_it_was_written() -> Result<()> {
    let original = fixture()?;
    for double in [false, true] {
        let (_dir, files) = written(&tensors(double)?)?;
        let mut books = CodeTables::new(CPU)?;
        let read = read(&files, "w", (160, 208), DType::F32, &mut books)?;
        let made =
            from_files(&original, "groups_bf16.original")?.into_matrix(double, DType::F32, &mut books)?;
        assert_eq!(bits(&floats(read.dequantize()?.real()?)?), bits(&floats(made.dequantize()?.real()?)?));
        assert_eq!((read.source_dtype(), read.bytes()), (DType::BF16, made.bytes()));
        let bits_a_value = 8.0 * read.bytes() as f64 / (160.0 * 208.0);
        // 4 + 8 / 64 + 32 / (64 * 256), with a short last group here
        let want = if double { 4.0 + 8.0 * (520.0 + 12.0) / 33280.0 } else { 4.5 };
        assert!((bits_a_value - want).abs() < 1e-9, "{bits_a_value}");
    }
    Ok(())
}

/// Replaces or removes a tensor.
fn with(mut tensors: Vec<(String, Tensor)>, part: &str, t: Option<Tensor>) -> Vec<(String, Tensor)> {
    let name = if part.is_empty() { "w".to_string() } else { format!("w.{part}") };
    tensors.retain(|(n, _)| *n != name);
    tensors.extend(t.map(|t| (name, t)));
    tensors
}

const STATE: &str = "quant_state.bitsandbytes__nf4";

/// The JSON with a substring replaced.
fn state_with(tensors: &[(String, Tensor)], from: &str, to: &str) -> Result<Tensor> {
    let (_, t) = tensors.iter().find(|(n, _)| n.ends_with(STATE)).context("a state")?;
    let text = String::from_utf8(t.to_vec1()?)?;
    assert!(text.contains(from), "{text}");
    Ok(Tensor::new(text.replace(from, to).into_bytes(), CPU)?)
}

fn refused(tensors: &[(String, Tensor)]) -> Result<String> {
    let (_dir, files) = written(tensors)?;
    let error =
        read(&files, "w", (160, 208), DType::F32, &mut CodeTables::new(CPU)?).err().context("it was read")?;
    assert_eq!(error.exit_code(), ft_base::ExitCode::Model);
    let text = error.to_string();
    assert!(text.contains(": w: "), "{text}");
    Ok(text)
}

#[test]
fn a_quantization_state_that_contradicts_its_tensors_is_refused() -> Result<()> {
    let good = tensors(true)?;
    for (from, to, says) in [
        ("[160,208]", "[208,160]", "shape: [208,160]; config.json makes it [160, 208]"),
        ("[160,208]", "[160,208,1]", "shape"),
        ("[160,208]", "null", "shape: null"),
        ("[160,208]", "[160.5,208]", "shape"),
        ("\"blocksize\":64", "\"blocksize\":63", "blocksize: 63; a power of two"),
        ("\"blocksize\":64", "\"blocksize\":128", "absmax has 520 values; 260 are wanted"),
        ("\"blocksize\":64", "\"blocksize\":18446744073709551615", "blocksize"),
        ("\"blocksize\":64", "\"blocksize\":-64", "blocksize"),
        ("\"blocksize\":64,", "", "blocksize: null"),
        ("\"nf4\"", "\"fp4\"", "quant_type: \"fp4\"; \"nf4\" is wanted"),
        ("\"bfloat16\"", "\"int8\"", "dtype: \"int8\""),
        ("\"nested_blocksize\":256", "\"nested_blocksize\":0", "nested_blocksize: 0"),
        ("\"nested_blocksize\":256", "\"nested_blocksize\":128", "nested_absmax has 3 values; 5 are wanted"),
        ("\"nested_dtype\":\"float32\"", "\"nested_dtype\":\"float64\"", "nested_dtype"),
        ("\"nested_offset\":", "\"nested_offset\":1e99,\"x\":", "x: ft does not know this key"),
        (
            "\"nested_offset\":",
            "\"nested_offset\":\"nan\",\"shape\":[160,208],\"nested_dtype\":\"float32\"}//",
            "not JSON",
        ),
        ("{", "[", "not JSON"),
    ] {
        let bad = with(good.clone(), STATE, Some(state_with(&good, from, to)?));
        let text = refused(&bad)?;
        assert!(text.contains(says), "{to}: {text}");
    }
    let huge = state_with(
        &good,
        "\"nested_offset\":",
        "\"nested_offset\":1e300,\"quant_type\":\"nf4\",\"blocksize\":64}",
    )?;
    assert!(refused(&with(good.clone(), STATE, Some(huge)))?.contains("not JSON"));
    let long = Tensor::new(vec![b' '; 1 << 17], CPU)?;
    assert!(refused(&with(good, STATE, Some(long)))?.contains("131072 bytes"));
    Ok(())
}

#[test]
fn tensors_that_do_not_belong_are_refused_by_name() -> Result<()> {
    let good = tensors(true)?;
    let f32s = |n: usize, x: f32| Tensor::full(x, n, CPU).map(Some);
    let mut table = vec![0.1f32; 16];
    table[0] = f32::NAN;
    for (part, t, says) in [
        ("", Some(Tensor::zeros((100, 1), DType::U8, CPU)?), "100 bytes of codes; [160, 208] takes 16640"),
        ("absmax", None, "absmax is missing"),
        ("absmax", Some(Tensor::zeros(519, DType::U8, CPU)?), "absmax has 519 values; 520"),
        ("absmax", f32s(520, 0.1)?, "absmax is F32, not U8"),
        ("quant_map", None, "quant_map is missing"),
        ("quant_map", f32s(8, 0.0)?, "quant_map has 8 values; 16"),
        ("quant_map", f32s(16, 0.5)?, "quant_map is not the table of nf4"),
        ("quant_map", Some(Tensor::new(table, CPU)?), "quant_map has a value that is not finite"),
        ("nested_absmax", None, "nested_absmax is missing"),
        ("nested_absmax", f32s(3, f32::INFINITY)?, "nested_absmax has a value that is not finite"),
        ("nested_quant_map", f32s(255, 0.0)?, "nested_quant_map has 255 values; 256"),
        ("nested_quant_map", f32s(256, f32::NAN)?, "nested_quant_map has a value that is not finite"),
    ] {
        let text = refused(&with(good.clone(), part, t))?;
        assert!(text.contains(says), "{part}: {text}");
    }
    let single = tensors(false)?;
    let text = refused(&with(single.clone(), "absmax", f32s(520, f32::NAN)?))?;
    assert!(text.contains("absmax has a value that is not finite"), "{text}");
    let text = refused(&with(single, "nested_absmax", f32s(3, 1.0)?))?;
    assert!(text.contains("there are nested tensors"), "{text}");
    Ok(())
}

#[test]
fn matrices_that_cannot_be_quantized_are_refused_by_name() -> Result<()> {
    let bad = |t: Tensor| -> Result<String> {
        let (_dir, files) = written(&[("w".into(), t)])?;
        Ok(from_files(&files, "w").err().context("it was quantized")?.to_string())
    };
    let mut values = vec![0.5f32; 4 * 64];
    values[200] = f32::NAN;
    let said = bad(Tensor::from_vec(values.clone(), (4, 64), CPU)?)?;
    assert!(said.contains("\"w\" has a value that is not finite") && said.contains("at [3, 8]"), "{said}");
    assert!(Encoded::new("w", &values, (4, 64), DType::F32).is_err());
    assert!(bad(Tensor::zeros((4, 64), DType::U8, CPU)?)?.contains("w: U8"));
    assert!(bad(Tensor::zeros(64, DType::F32, CPU)?)?.contains("shape [64]"));
    let (_dir, files) = written(&[("w".into(), Tensor::zeros((4, 64), DType::F32, CPU)?)])?;
    assert!(from_files(&files, "v").err().context("no such tensor")?.to_string().contains("\"v\""));
    Ok(())
}
