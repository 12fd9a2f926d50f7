//! Writing of safetensors files, loadable by other programs and deterministic to the byte.
//!
//! The header depends only on names, dtypes and shapes, so tensors are streamed with only one in memory.
//! The order within a file is that of the safetensors crate: wide dtypes first (for alignment), then by name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::{DType, Storage, Tensor};

use super::{Entry, Error, wrong};
use ft_base::store::{AtomicFile, free_bytes, remove_if_there, reopen, sync_folder, write_json};
use ft_kernels::to_host;

/// Writes one safetensors file atomically.
///
/// `metadata` becomes the `__metadata__` of the file, sorted by key. transformers requires `("format",
/// "pt")`.
///
/// # Errors
/// [`Error::Write`] with the path and the bytes needed; [`Error::Twice`] for a duplicate name.
pub fn write_file(path: &Path, tensors: &[(String, Tensor)], metadata: &[(&str, &str)]) -> Result<(), Error> {
    let by_name: BTreeMap<&str, &Tensor> = tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
    let entries: Vec<Entry> =
        tensors.iter().map(|(name, t)| (name.clone(), t.dtype(), t.dims().to_vec())).collect();
    write_each(path, &entries, metadata, |name| Ok(by_name[name].clone()))
}

/// As [`write_file`], with only one tensor in memory at a time: calls `get` once per entry in file order.
///
/// # Errors
/// As [`write_file`]; [`Error::Announced`] for a tensor unlike its entry; errors of `get`.
pub fn write_each<E: From<Error>>(
    path: &Path,
    entries: &[Entry],
    metadata: &[(&str, &str)],
    get: impl FnMut(&str) -> Result<Tensor, E>,
) -> Result<(), E> {
    Ok(Plan::new(outputs(path, entries)?, metadata).write(path, get)?.commit()?)
}

/// Writes a model as one safetensors file, or as shards with an index, named as in transformers:
/// `STEM.safetensors`, or `STEM-00001-of-00002.safetensors` and `STEM.safetensors.index.json`.
///
/// Calls `get` once per tensor in file order, with only one tensor in memory at a time. A tensor larger
/// than `max_shard_bytes` gets a separate shard. Readers never see a mix of an old model and the new one: an
/// old index is removed first, and the new one is written last. Returns the paths of the files.
///
/// # Errors
/// [`Error::DiskFull`] before anything is written; [`Error::Write`]; [`Error::Announced`] for a tensor
/// unlike its entry; errors of `get`.
pub fn write_sharded(
    dir: &Path,
    stem: &str,
    entries: &[Entry],
    max_shard_bytes: u64,
    mut get: impl FnMut(&str) -> Result<Tensor, ft_base::Error>,
) -> Result<Vec<PathBuf>, ft_base::Error> {
    let mut all = outputs(dir, entries)?;
    all.sort_by(|a, b| a.name.cmp(&b.name));
    let total: u64 = all.iter().map(|e| e.bytes).sum();
    let shards: Vec<Plan> =
        split(all, max_shard_bytes).into_iter().map(|s| Plan::new(s, &[("format", "pt")])).collect();

    check_space(dir, dir, shards.iter().map(Plan::bytes).sum())?;
    // All shards are complete under temporary names before the first is renamed.
    let mut pendings = Vec::with_capacity(shards.len());
    let mut paths = Vec::with_capacity(shards.len() + 1);
    let mut weight_map = BTreeMap::new();
    for (i, plan) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => format!("{stem}.safetensors"),
            n => format!("{stem}-{:05}-of-{n:05}.safetensors", i + 1),
        };
        let path = dir.join(&name);
        pendings.push(plan.write(&path, &mut get)?);
        weight_map.extend(plan.entries.iter().map(|e| (e.name.clone(), name.clone())));
        paths.push(path);
    }

    let index = dir.join(format!("{stem}.safetensors.index.json"));
    remove_if_there(&index)?;
    if shards.len() > 1 {
        // Readers prefer a single file, so an old one would hide the new shards.
        remove_if_there(&dir.join(format!("{stem}.safetensors")))?;
    }
    sync_folder(dir)?;
    pendings.into_iter().try_for_each(AtomicFile::commit)?;
    if shards.len() > 1 {
        let json = serde_json::json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_json(&index, &json)?;
        paths.push(index);
    }
    Ok(paths)
}

/// Refuses a write of `needed` bytes to `dir` if the disk has less; `path` is named in the error.
pub(super) fn check_space(path: &Path, dir: &Path, needed: u64) -> Result<(), Error> {
    match free_bytes(dir) {
        Some(free) if needed > free => Err(Error::DiskFull { path: path.to_path_buf(), needed, free }),
        _ => Ok(()),
    }
}

/// A tensor to be written, with its format and size in the file.
pub(super) struct Output {
    pub(super) name: String,
    pub(super) dtype: DType,
    format: safetensors::Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: u64,
}

impl Output {
    fn new(name: &str, dtype: DType, shape: &[usize]) -> Result<Output, Error> {
        let format = match dtype {
            DType::U8 => safetensors::Dtype::U8,
            DType::U32 => safetensors::Dtype::U32,
            DType::I64 => safetensors::Dtype::I64,
            DType::F16 => safetensors::Dtype::F16,
            DType::BF16 => safetensors::Dtype::BF16,
            DType::F32 => safetensors::Dtype::F32,
            DType::F64 => safetensors::Dtype::F64,
            DType::F8E4M3 => safetensors::Dtype::F8_E4M3,
            other => return Err(no_format(name, other)),
        };
        // Passed through as bytes.
        let dtype = if dtype == DType::F8E4M3 { DType::U8 } else { dtype };
        let bytes = shape.iter().product::<usize>() as u64 * (format.bitsize() / 8) as u64;
        Ok(Output { name: name.to_string(), dtype, format, shape: shape.to_vec(), bytes })
    }
}

/// A file to be written: tensors in file order, and the header.
struct Plan {
    entries: Vec<Output>,
    header: Vec<u8>,
}

impl Plan {
    fn new(mut entries: Vec<Output>, metadata: &[(&str, &str)]) -> Plan {
        entries.sort_by(|a, b| b.format.cmp(&a.format).then_with(|| a.name.cmp(&b.name)));
        let mut json = serde_json::Map::new();
        if !metadata.is_empty() {
            let sorted: BTreeMap<_, _> = metadata.iter().copied().collect();
            json.insert("__metadata__".to_string(), serde_json::json!(sorted));
        }
        let mut at = 0u64;
        for entry in &entries {
            json.insert(
                entry.name.clone(),
                serde_json::json!({
                    "dtype": entry.format.to_string(),
                    "shape": entry.shape,
                    "data_offsets": [at, at + entry.bytes],
                }),
            );
            at += entry.bytes;
        }
        let mut text = serde_json::Value::Object(json).to_string().into_bytes();
        // The format requires padding of the header to a multiple of 8 bytes, to align the data.
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.append(&mut text);
        Plan { entries, header }
    }

    fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.entries.iter().map(|e| e.bytes).sum::<u64>()
    }

    /// Writes the file, not yet under its name. Calls `get` once per tensor in file order.
    fn write<E: From<Error>>(
        &self,
        path: &Path,
        mut get: impl FnMut(&str) -> Result<Tensor, E>,
    ) -> Result<AtomicFile, E> {
        let mut pending = AtomicFile::create(path, Some(self.bytes()))?;
        pending.write(&self.header)?;
        for entry in &self.entries {
            write_tensor(&mut pending, entry, &get(&entry.name)?)?;
        }
        Ok(pending)
    }
}

/// Distributes entries over shards in order; returns at least one shard.
fn split(entries: Vec<Output>, max_bytes: u64) -> Vec<Vec<Output>> {
    let mut shards = vec![Vec::new()];
    let mut size = 0u64;
    for entry in entries {
        if size > 0 && size + entry.bytes > max_bytes {
            shards.push(Vec::new());
            size = 0;
        }
        size += entry.bytes;
        if let Some(last) = shards.last_mut() {
            last.push(entry);
        }
    }
    shards
}

/// The tensors of a file; refuses duplicate names.
pub(super) fn outputs(path: &Path, entries: &[Entry]) -> Result<Vec<Output>, Error> {
    let outputs = entries.iter().map(|(name, dtype, shape)| Output::new(name, *dtype, shape));
    let outputs = outputs.collect::<Result<_, _>>()?;
    let mut seen = BTreeSet::from(["__metadata__"]);
    match entries.iter().find(|(name, ..)| !seen.insert(name.as_str())) {
        Some((name, ..)) => Err(Error::Twice { path: path.to_path_buf(), name: name.clone() }),
        None => Ok(outputs),
    }
}

pub(super) fn write_tensor(pending: &mut AtomicFile, entry: &Output, tensor: &Tensor) -> Result<(), Error> {
    if tensor.dtype() != entry.dtype || tensor.dims() != entry.shape {
        return Err(Error::Announced {
            name: entry.name.clone(),
            announced: format!("{:?} {:?}", entry.dtype, entry.shape),
            came: format!("{:?} {:?}", tensor.dtype(), tensor.dims()),
        });
    }
    stream(&entry.name, tensor, &mut |bytes| pending.write(bytes))
}

/// The error for a dtype unknown to safetensors.
fn no_format(name: &str, dtype: DType) -> Error {
    let from = dtype.as_str().to_uppercase();
    Error::Convert { name: name.to_string(), from, to: "a safetensors format".to_string() }
}

/// Calls `put` with the bytes of a tensor, in chunks. Values of the format are little-endian, as on all processors
/// supported.
fn stream(name: &str, tensor: &Tensor, put: &mut dyn FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
    let candle = |e| wrong(name, e);
    let flat = to_host(tensor).and_then(|t| t.flatten_all()).map_err(candle)?;
    macro_rules! stream {
        ($t:ty) => {{
            let (storage, layout) = flat.storage_and_layout();
            let range = layout.contiguous_offsets();
            let values = match (&*storage, range) {
                (Storage::Cpu(s), Some((start, end))) => &s.as_slice::<$t>().map_err(candle)?[start..end],
                _ => return Err(candle(candle_core::Error::Msg("not contiguous on the CPU".into()))),
            };
            values.chunks(CHUNK).try_for_each(|chunk| put(bytemuck::cast_slice(chunk)))?;
        }};
    }
    const CHUNK: usize = 1 << 18;
    match flat.dtype() {
        DType::U8 => stream!(u8),
        DType::U32 => stream!(u32),
        DType::I64 => stream!(i64),
        DType::F16 => stream!(half::f16),
        DType::BF16 => stream!(half::bf16),
        DType::F32 => stream!(f32),
        DType::F64 => stream!(f64),
        other => return Err(no_format(name, other)),
    }
    Ok(())
}

/// A safetensors file written jointly by several writers, with disjoint element ranges. The folder must
/// not be read before all writers are done.
pub struct SharedFile {
    path: PathBuf,
    plan: Plan,
    /// Offset in the file, and index into the entries, by tensor name.
    at: BTreeMap<String, (u64, usize)>,
}

impl SharedFile {
    /// Prepares the file `path`. All writers must pass the same tensors and metadata.
    ///
    /// # Errors
    /// [`Error::Twice`] for a duplicate name; [`Error::Convert`] for a dtype unknown to safetensors.
    pub fn new(path: &Path, tensors: &[Entry], metadata: &[(&str, &str)]) -> Result<Self, Error> {
        let plan = Plan::new(outputs(path, tensors)?, metadata);
        let (mut at, mut from) = (BTreeMap::new(), plan.header.len() as u64);
        for (i, e) in plan.entries.iter().enumerate() {
            at.insert(e.name.clone(), (from, i));
            from += e.bytes;
        }
        Ok(Self { path: path.to_path_buf(), plan, at })
    }

    fn failed<'a>(&'a self, what: &'static str) -> impl Fn(std::io::Error) -> Error + 'a {
        move |e| Error::write_sized(what, &self.path, Some(self.plan.bytes()), e)
    }

    /// Creates the file in full length, with the header. Called by one writer, before any writes.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn create(&self) -> Result<(), Error> {
        let created = OpenOptions::new().write(true).create_new(true).open(&self.path);
        let file = created.map_err(self.failed("create"))?;
        file.set_len(self.plan.bytes()).map_err(self.failed("write"))?;
        file.write_all_at(&self.plan.header, 0).map_err(self.failed("write"))
    }

    /// Writes ranges of tensors: name, element ranges, and the values of all ranges in order. They are on the disk
    /// then: several machines with one file learn only of errors of their own writes.
    ///
    /// # Errors
    /// [`Error::Write`]; [`Error::Announced`] for an unknown tensor, a wrong dtype, elements out of range, or another
    /// number of values than elements.
    pub fn write<'t>(
        &self,
        parts: impl IntoIterator<Item = (&'t str, Vec<Range<usize>>, Tensor)>,
    ) -> Result<(), Error> {
        let file = reopen(&self.path)?;
        for (name, ranges, values) in parts {
            let found = self.at.get(name).map(|(from, i)| (*from, &self.plan.entries[*i]));
            let width = values.dtype().size_in_bytes() as u64;
            let end = ranges.iter().map(|r| r.end).max().unwrap_or(0) as u64 * width;
            let all = ranges.iter().map(|r| r.len()).sum::<usize>() == values.elem_count();
            let place = found.filter(|(_, e)| values.dtype() == e.dtype && end <= e.bytes && all);
            let Some((from, _)) = place else {
                return Err(Error::Announced {
                    name: name.to_string(),
                    announced: found
                        .map_or("nothing".into(), |(_, e)| format!("{:?} {:?}", e.dtype, e.shape)),
                    came: format!("{:?} {ranges:?}, {} values", values.dtype(), values.elem_count()),
                });
            };
            let mut left = ranges.into_iter().map(|r| r.start as u64 * width..r.end as u64 * width);
            let mut now = 0..0;
            stream(name, &values, &mut |mut bytes| {
                while !bytes.is_empty() {
                    if now.is_empty() {
                        now = left.find(|r| !r.is_empty()).unwrap_or(0..u64::MAX);
                    }
                    let n = (now.end - now.start).min(bytes.len() as u64);
                    let (head, tail) = bytes.split_at(n as usize);
                    file.write_all_at(head, from + now.start).map_err(self.failed("write"))?;
                    (bytes, now.start) = (tail, now.start + n);
                }
                Ok(())
            })?;
        }
        file.sync_all().map_err(self.failed("sync"))
    }
}
