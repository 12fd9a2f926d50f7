//! Serialization of a quantized weight in bitsandbytes' format: `weight` and three or five companion
//! tensors.
//!
//! * `weight`: two codes per byte, `[values / 2, 1]` u8, or another dtype of equal byte size
//!   (`bnb_4bit_quant_storage`)
//! * `weight.absmax`: scale of every block, f32; u8 codes with double quantization
//! * `weight.quant_map`: values of the 16 codes, f32
//! * `weight.nested_absmax`: factor of every group of scales, f32 (double quantization only)
//! * `weight.nested_quant_map`: values of the 256 scale codes, f32 (double quantization only)
//! * `weight.quant_state.bitsandbytes__nf4` (or `fp4`): a JSON object as bytes: shape, dtype, block sizes,
//!   offset
//!
//! The contents are untrusted: sizes are checked against config.json and against one another.

use super::codebook::{CodeTables, Type};
use super::encode::{BLOCK, GROUP, Nested};
use super::error::Error;
use super::lazy::{LazyMatrix, LazyScales, LazyVector, ReadRange};
use super::mxfp4;
use crate::files::{TensorFiles, torch_name};
use candle_core::{DType, Device, Tensor};
use ft_base::store;
use ft_kernels::quantized::{QuantizedMatrix, dynamic_map};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::ops::Range;

/// Length limit of the JSON, in bytes.
const LONGEST: u64 = 1 << 16;
/// Block sizes supported by bitsandbytes.
const BLOCKS: [usize; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];
/// Known keys of the JSON object.
const KEYS: [&str; 7] =
    ["quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset"];

/// Validated JSON of a quantized weight.
struct State {
    block: usize,
    source: DType,
    /// Scales per group, and offset, with double quantization.
    nested: Option<(usize, f32)>,
}

/// Names of the companion tensors of a weight, if quantized in this file.
pub fn find(files: &TensorFiles, weight: &str) -> Option<Vec<String>> {
    if let Some(names) = mxfp4::find(files, weight) {
        return Some(names);
    }
    let kind = kind(files, weight)?;
    let mut names = vec![
        format!("{weight}.absmax"),
        format!("{weight}.quant_map"),
        format!("{weight}.quant_state.bitsandbytes__{}", kind.name()),
    ];
    let nested = [format!("{weight}.nested_absmax"), format!("{weight}.nested_quant_map")];
    if nested.iter().any(|n| files.info(n).is_some()) {
        names.extend(nested);
    }
    Some(names)
}

fn kind(files: &TensorFiles, weight: &str) -> Option<Type> {
    [Type::Nf4, Type::Fp4]
        .into_iter()
        .find(|t| files.info(&format!("{weight}.quant_state.bitsandbytes__{}", t.name())).is_some())
}

/// Original dtype of a quantized weight; `None` if not quantized or not stated.
pub fn source_dtype(files: &TensorFiles, weight: &str) -> Option<DType> {
    if mxfp4::find(files, weight).is_some() {
        return Some(DType::BF16);
    }
    let name = format!("{weight}.quant_state.bitsandbytes__{}", kind(files, weight)?.name());
    dtype(object(files, &name).ok()?.get("dtype")?)
}

fn dtype(name: &Value) -> Option<DType> {
    [DType::F32, DType::F16, DType::BF16].into_iter().find(|dtype| name == torch_name(*dtype))
}

/// Validates a quantized weight of `dims`, except for tensor values. `None` if valid or not quantized.
pub fn problems(files: &TensorFiles, weight: &str, dims: (usize, usize)) -> Option<String> {
    if mxfp4::find(files, weight).is_some() {
        return mxfp4::problems(files, weight, dims);
    }
    kind(files, weight).and_then(|t| state(files, weight, t, dims).err())
}

/// A quantized weight of a checkpoint.
#[derive(Clone)]
struct Stored<'a> {
    files: &'a TensorFiles,
    name: String,
}

impl Stored<'_> {
    fn fail(&self, why: String) -> ft_base::Error {
        Error::State { file: self.files.folder(), name: self.name.clone(), why }.into()
    }

    /// A range of a companion tensor.
    fn floats(&self, part: &str, r: Range<usize>) -> ft_base::Result<Tensor> {
        let name = format!("{}.{part}", self.name);
        self.files.part(&name, r, DType::F32, &Device::Cpu).map_err(|e| match e {
            store::Error::NotFinite { .. } => self.fail(format!("{part} has a value that is not finite")),
            e => e.into(),
        })
    }
}

/// Opens a quantized weight of `dims` for lazy reading; small tensors are read and validated at once.
///
/// # Errors
/// [`Error::State`] with the weight's name for inconsistent tensors; read errors.
pub fn open<'a>(
    files: &'a TensorFiles,
    weight: &str,
    dims: (usize, usize),
) -> ft_base::Result<LazyMatrix<'a>> {
    if mxfp4::find(files, weight).is_some() {
        return mxfp4::open(files, weight, dims);
    }
    let w = Stored { files, name: weight.into() };
    let kind = kind(files, weight).ok_or_else(|| w.fail("is not quantized".into()))?;
    let s = state(files, weight, kind, dims).map_err(|why| w.fail(why))?;
    let (n, blocks) = (dims.0 * dims.1, (dims.0 * dims.1).div_ceil(s.block));
    let floats = |part: &str, len| -> ft_base::Result<Vec<f32>> { Ok(w.floats(part, 0..len)?.to_vec1()?) };
    // bitsandbytes stores the table but dequantizes with a built-in one.
    if !floats("quant_map", 16)?.iter().zip(kind.table()).all(|(a, b)| (a - b).abs() <= 1e-6) {
        return Err(w.fail(format!("quant_map is not the table of {}", kind.name())));
    }
    let bytes = |name: String, len| LazyVector {
        dtype: DType::U8,
        len,
        read: Box::new(move |r| Ok(Tensor::new(files.read_part(&name, r)?, &Device::Cpu)?)),
    };
    let scales = match s.nested {
        None => {
            let w = w.clone();
            let read: ReadRange<'a> = Box::new(move |r| w.floats("absmax", r));
            LazyScales::Plain(LazyVector { dtype: DType::F32, len: blocks, read })
        }
        Some((group, offset)) => {
            let factors = floats("nested_absmax", blocks.div_ceil(group))?;
            let map = floats("nested_quant_map", 256)?;
            // A scale is map[code] * group factor + offset.
            let largest = |v: &[f32]| v.iter().fold(0f32, |m, x| m.max(x.abs()));
            if !(largest(&map) * largest(&factors) + offset.abs()).is_finite() {
                return Err(w.fail("nested_absmax is so large that weights would be infinite".into()));
            }
            let codes = bytes(format!("{weight}.absmax"), blocks);
            LazyScales::Nested { codes, factors: LazyVector::of(factors), map, group, offset }
        }
    };
    let packed = bytes(weight.into(), n.div_ceil(2));
    Ok(LazyMatrix { dims, block: s.block, kind, source: s.source, packed, scales })
}

/// Reads a quantized weight of `dims` for products in `compute` on the device of `books`.
///
/// # Errors
/// As [`open`].
pub fn read(
    files: &TensorFiles,
    weight: &str,
    dims: (usize, usize),
    compute: DType,
    books: &mut CodeTables,
) -> ft_base::Result<QuantizedMatrix> {
    open(files, weight, dims)?.whole(compute, books)
}

/// Reads and validates the JSON and the sizes of the companion tensors.
fn state(files: &TensorFiles, weight: &str, kind: Type, dims: (usize, usize)) -> Result<State, String> {
    let name = format!("quant_state.bitsandbytes__{}", kind.name());
    let json = object(files, &format!("{weight}.{name}")).map_err(|why| format!("{name}: {why}"))?;
    let s = parse(&json, kind, dims).map_err(|why| format!("{name}: {why}"))?;
    let n = dims.0 * dims.1;
    let stored = files.info(weight).map_or(0, |i| i.bytes());
    if stored != n.div_ceil(2) as u64 {
        let (o, i) = dims;
        return Err(format!("{stored} bytes of codes; [{o}, {i}] takes {}", n.div_ceil(2)));
    }
    let blocks = n.div_ceil(s.block);
    let check = |part: &str, formats: &[Dtype], count: usize| {
        let info = files.info(&format!("{weight}.{part}")).ok_or_else(|| format!("{part} is missing"))?;
        match info.elements() {
            found if found != count => Err(format!("{part} has {found} values; {count} are wanted")),
            _ if !formats.contains(&info.dtype) => {
                Err(format!("{part} is {}, not {}", info.dtype, formats[0]))
            }
            _ => Ok(()),
        }
    };
    check("quant_map", &[Dtype::F32], 16)?;
    match s.nested {
        None => check("absmax", &[Dtype::F32, Dtype::F16, Dtype::BF16], blocks)?,
        Some((group, _)) => {
            check("absmax", &[Dtype::U8], blocks)?;
            check("nested_absmax", &[Dtype::F32], blocks.div_ceil(group))?;
            check("nested_quant_map", &[Dtype::F32], 256)?;
        }
    }
    let has_nested = |part: &str| files.info(&format!("{weight}.{part}")).is_some();
    if s.nested.is_none() && (has_nested("nested_absmax") || has_nested("nested_quant_map")) {
        return Err(format!("{name}: has no nested_blocksize, and there are nested tensors"));
    }
    Ok(s)
}

fn object(files: &TensorFiles, name: &str) -> Result<Map<String, Value>, String> {
    let bytes = files.info(name).map_or(0, |i| i.bytes());
    if bytes > LONGEST {
        return Err(format!("{bytes} bytes; a JSON object of some 200 is wanted"));
    }
    let bytes = files.read(name).map_err(|e| e.to_string())?;
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err("not a JSON object".into()),
        Err(e) => Err(format!("not JSON: {e}")),
    }
}

fn parse(json: &Map<String, Value>, kind: Type, dims: (usize, usize)) -> Result<State, String> {
    if let Some(unknown) = json.keys().find(|k| !KEYS.contains(&k.as_str())) {
        return Err(format!("{unknown}: ft does not know this key"));
    }
    let get = |key: &str| json.get(key).unwrap_or(&Value::Null);
    let bad = |key: &str, want: &str| format!("{key}: {}; {want}", get(key));
    if get("quant_type").as_str() != Some(kind.name()) {
        return Err(bad("quant_type", &format!("\"{}\" is wanted, as the tensor's name says", kind.name())));
    }
    let block = get("blocksize")
        .as_u64()
        .and_then(|b| BLOCKS.into_iter().find(|k| *k as u64 == b))
        .ok_or_else(|| bad("blocksize", "a power of two from 32 to 4096 is wanted"))?;
    let source = dtype(get("dtype")).ok_or_else(|| bad("dtype", "float32, float16 or bfloat16 is wanted"))?;
    if get("shape") != &json!([dims.0, dims.1]) {
        return Err(bad("shape", &format!("config.json makes it [{}, {}]", dims.0, dims.1)));
    }
    let nested = ["nested_blocksize", "nested_dtype", "nested_offset"];
    let nested = if nested.iter().all(|k| get(k).is_null()) {
        None
    } else {
        let group = get("nested_blocksize")
            .as_u64()
            .filter(|g| g.is_power_of_two() && *g <= 4096)
            .ok_or_else(|| bad("nested_blocksize", "a power of two up to 4096 is wanted"))?;
        if get("nested_dtype").as_str() != Some("float32") {
            return Err(bad("nested_dtype", "float32 is wanted"));
        }
        let offset = get("nested_offset")
            .as_f64()
            .map(|x| x as f32)
            .filter(|x| x.is_finite())
            .ok_or_else(|| bad("nested_offset", "a finite number is wanted"))?;
        Some((group as usize, offset))
    };
    Ok(State { block, source, nested })
}

/// A tensor to write for a quantized weight.
#[derive(Clone, Debug)]
pub struct Entry {
    pub name: String,
    /// Value; `None` for the codes, computed while writing.
    pub value: Option<Tensor>,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

/// Tensors of an NF4 weight `[rows, cols]` with these scales, in the format of bitsandbytes; `double`
/// applies double quantization.
///
/// # Errors
/// Tensor errors from candle.
pub fn entries(
    weight: &str,
    (rows, cols): (usize, usize),
    source: DType,
    scales: &[f32],
    double: bool,
) -> candle_core::Result<Vec<Entry>> {
    let cpu = &Device::Cpu;
    let dtype = torch_name(source);
    let mut json = json!({"quant_type": "nf4", "blocksize": BLOCK, "dtype": dtype, "shape": [rows, cols]});
    let mut parts = vec![("quant_map", Tensor::new(&Type::Nf4.table(), cpu)?)];
    if double {
        let n = Nested::new(scales);
        json["nested_blocksize"] = json!(GROUP);
        json["nested_dtype"] = json!("float32");
        json["nested_offset"] = json!(f64::from(n.offset));
        parts.push(("absmax", Tensor::new(n.codes, cpu)?));
        parts.push(("nested_absmax", Tensor::new(n.absmax, cpu)?));
        parts.push(("nested_quant_map", Tensor::new(&dynamic_map(true), cpu)?));
    } else {
        parts.push(("absmax", Tensor::new(scales, cpu)?));
    }
    parts.push(("quant_state.bitsandbytes__nf4", Tensor::new(json.to_string().into_bytes(), cpu)?));
    let codes = vec![(rows * cols).div_ceil(2), 1];
    let mut out = vec![Entry { name: weight.into(), value: None, dtype: DType::U8, shape: codes }];
    out.extend(parts.into_iter().map(|(part, t)| Entry {
        name: format!("{weight}.{part}"),
        dtype: t.dtype(),
        shape: t.dims().to_vec(),
        value: Some(t),
    }));
    Ok(out)
}
