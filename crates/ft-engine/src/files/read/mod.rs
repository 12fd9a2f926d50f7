//! Tensors by name, from one file or from the shards of a model.

mod views;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;

pub use views::SplitTensor;

use super::convert::{Load, Scales};
use super::mxfp4::{self, MXFP4_BLOCK};
use super::{Error, header, wrong};
use ft_base::store::hash::{self, StreamHasher};
use ft_base::store::{SINGLE, folder_of, index, is_pickle_name, open_inside};
use ft_kernels::cpu;

/// Bytes read per task.
const PIECE: usize = 16 << 20;

/// Name, size in bytes and BLAKE3 hash of a file.
pub type FileHash = (String, u64, String);

/// A tensor as described by the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Dtype in the file.
    pub dtype: Dtype,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Index into [`TensorFiles::files`].
    file: usize,
    /// Byte range in the file.
    place: Range<u64>,
    /// Whether the file holds the transpose of this matrix.
    transposed: bool,
}

impl TensorInfo {
    /// Size in the file, in bytes.
    pub fn bytes(&self) -> u64 {
        self.place.end - self.place.start
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn check_range(&self, name: &str, r: &Range<usize>, count: usize) -> Result<(), Error> {
        if r.start <= r.end && r.end <= count { Ok(()) } else { Err(self.outside(name, r.start, r.end)) }
    }

    /// The error for a range outside of the tensor `name`.
    fn outside(&self, name: &str, start: usize, end: usize) -> Error {
        Error::Rows { name: name.to_string(), start, end, shape: self.shape.clone() }
    }
}

/// Scales of an 8-bit matrix, one a block.
#[derive(Clone, Debug)]
struct Scale {
    name: String,
    info: TensorInfo,
    /// Rows and columns of a block.
    block: [usize; 2],
}

/// Open safetensors files with validated headers. Tensors are read on demand.
///
/// Files are not mapped into memory: truncation by another program results in an error, where a mapping
/// would crash the process.
#[derive(Debug)]
pub struct TensorFiles {
    /// The folder or file passed to open.
    root: PathBuf,
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
    /// Tensors replaced by [`TensorFiles::split`].
    splits: Vec<SplitTensor>,
    /// Scales of 8-bit tensors: see [`TensorFiles::scale`].
    scales: BTreeMap<String, Scale>,
    /// Blocks and scales of tensors read from MXFP4: see [`TensorFiles::decode`].
    decoded: BTreeMap<String, [(String, TensorInfo); 2]>,
    /// Hash state per file, if hashed while reading; `None` for files with a cached hash.
    passing: OnceLock<Vec<Option<StreamHasher>>>,
}

impl TensorFiles {
    /// Opens the weights of a model folder: `model.safetensors`, else the shards listed in
    /// `model.safetensors.index.json`, in the same order as transformers.
    ///
    /// # Errors
    /// Missing weights, pickle files, files outside of the folder, inconsistent headers or index.
    /// Messages name the file and the tensor.
    pub fn open_model(dir: &Path) -> Result<TensorFiles, Error> {
        let exists = |name: &str| dir.join(name).symlink_metadata().is_ok();
        if exists(SINGLE) {
            let mut files = TensorFiles::empty(dir);
            files.add(dir, SINGLE)?;
            return Ok(files);
        }
        if !exists(index::INDEX) {
            return Err(no_weights(dir));
        }
        let map = index::read(dir, index::INDEX)?;
        let bad = |problem: String| Error::Index { path: dir.join(index::INDEX), problem };
        let mut shards: Vec<&String> = map.values().collect();
        shards.sort();
        shards.dedup();
        let mut files = TensorFiles::empty(dir);
        for shard in shards {
            if is_pickle_name(shard) {
                return Err(Error::Pickle { path: dir.join(shard) });
            }
            for name in files.add(dir, shard)? {
                match map.get(&name) {
                    Some(named) if named == shard => {}
                    Some(named) => {
                        return Err(bad(format!(
                            "{shard:?} holds tensor {name:?}, for which the index names {named:?}"
                        )));
                    }
                    None => {
                        return Err(bad(format!(
                            "{shard:?} holds tensor {name:?}, which the index does not name"
                        )));
                    }
                }
            }
        }
        for (name, shard) in &map {
            if !files.tensors.contains_key(name) {
                return Err(bad(format!(
                    "it names {shard:?} for tensor {name:?}, and that file does not hold it"
                )));
            }
        }
        Ok(files)
    }

    /// Opens a single safetensors file, such as an adapter.
    ///
    /// # Errors
    /// As [`TensorFiles::open_model`].
    pub fn open_file(path: &Path) -> Result<TensorFiles, Error> {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "not the name of a file");
            return Err(Error::read(path, source));
        };
        if is_pickle_name(name) {
            return Err(Error::Pickle { path: path.to_path_buf() });
        }
        let mut files = TensorFiles::empty(path);
        files.add(folder_of(path), name)?;
        Ok(files)
    }

    /// Bytes per element of the first floating-point matrix in the first weight file of a model folder.
    /// `None` if there is no valid file or no such matrix.
    pub fn matrix_width(dir: &Path) -> Option<u64> {
        let mut names: Vec<_> = std::fs::read_dir(dir).ok()?.flatten().map(|e| e.file_name()).collect();
        names.retain(|n| n.to_str().is_some_and(|n| n.starts_with("model") && n.ends_with(".safetensors")));
        let files = TensorFiles::open_file(&dir.join(names.into_iter().min()?)).ok()?;
        let number = |i: &&TensorInfo| matches!(i.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
        let matrix = files.tensors.values().filter(number).find(|i| i.shape.len() == 2)?;
        Some(matrix.dtype.bitsize() as u64 / 8)
    }

    fn empty(root: &Path) -> TensorFiles {
        TensorFiles {
            root: root.to_path_buf(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            metadata: BTreeMap::new(),
            splits: Vec::new(),
            scales: BTreeMap::new(),
            decoded: BTreeMap::new(),
            passing: OnceLock::new(),
        }
    }

    /// Adds the tensors of one file, and returns the names.
    fn add(&mut self, dir: &Path, name: &str) -> Result<Vec<String>, Error> {
        let (file, path) = open_inside(dir, name)?;
        let header = header::read(&file, &path)?;
        let index = self.files.len();
        let mut names = Vec::with_capacity(header.tensors.len());
        for (name, info) in header.tensors {
            // Cannot overflow: the header check bounds the offsets by the file size.
            let (start, end) = info.data_offsets;
            let place = header.data_start + start as u64..header.data_start + end as u64;
            names.push(name.clone());
            let (dtype, shape) = (info.dtype, info.shape);
            let info = TensorInfo { dtype, shape, file: index, place, transposed: false };
            if self.tensors.insert(name.clone(), info).is_some() {
                return Err(Error::Index {
                    path: self.root.join(index::INDEX),
                    problem: format!("tensor {name:?} is in two shards; {:?} is one", path),
                });
            }
        }
        // Shards of a model have the same metadata. In case of a difference, the first shard wins.
        for (key, value) in header.metadata {
            self.metadata.entry(key).or_insert(value);
        }
        self.files.push((path, file));
        Ok(names)
    }

    /// A tensor in its own dtype and shape, bit for bit, on the CPU; 8-bit floats as bytes.
    ///
    /// # Errors
    /// A dtype unsupported in memory; otherwise as [`TensorFiles::read`].
    pub fn untouched(&self, name: &str) -> Result<Tensor, Error> {
        let info = self.get(name)?;
        let dtype = match self.dtype_of(name)? {
            DType::F8E4M3 => DType::U8,
            dtype => dtype,
        };
        Tensor::from_raw_buffer(&self.read(name)?, dtype, &info.shape, &Device::Cpu)
            .map_err(|e| wrong(name, e))
    }

    /// Dtype in memory of a tensor read unchanged.
    ///
    /// # Errors
    /// A dtype unsupported in memory.
    pub fn dtype_of(&self, name: &str) -> Result<DType, Error> {
        let info = self.get(name)?;
        DType::try_from(info.dtype).map_err(|_| {
            let (path, from) = (self.files[info.file].0.clone(), info.dtype.to_string());
            Error::Unread { path, name: name.to_string(), from, to: "a tensor in memory".into() }
        })
    }

    /// All tensor names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Total size of the tensors in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(TensorInfo::bytes).sum()
    }

    /// Whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Dtype and shape of a tensor, if present.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The `__metadata__` of the file. With several shards, the first shard with a key wins.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The open files, sorted by name.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|(path, _)| path.as_path())
    }

    /// Folder of the files, for messages.
    pub fn folder(&self) -> String {
        self.paths().next().and_then(Path::parent).map_or(String::new(), |p| p.display().to_string())
    }

    /// Starts hashing files while tensors are read, except files with a cached hash.
    /// [`TensorFiles::hashes`] then reads only the remaining parts.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn hash_while_reading(&self) -> Result<(), Error> {
        let passing = self.files.iter().map(|(path, file)| StreamHasher::begin(file, path));
        // If already started, keep the existing state.
        let _ = self.passing.set(passing.collect::<Result<_, _>>()?);
        Ok(())
    }

    /// Hash state of a file, if hashed while reading.
    fn passing(&self, file: usize) -> Option<&StreamHasher> {
        self.passing.get()?.get(file)?.as_ref()
    }

    /// Name, size and BLAKE3 hash of each open file, sorted by name. Uses cached hashes of unchanged files.
    ///
    /// # Errors
    /// [`Error::Read`]; [`Error::Changed`] for a file changed meanwhile.
    pub fn hashes(&self) -> Result<Vec<FileHash>, Error> {
        let mut all = Vec::with_capacity(self.files.len());
        for (number, (path, file)) in self.files.iter().enumerate() {
            let (hash, bytes) = hash::of(file, path, self.passing(number))?;
            let name = path.file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned());
            all.push((name, bytes, hash));
        }
        all.sort();
        Ok(all)
    }

    /// The raw bytes of a tensor (little-endian, row-major).
    ///
    /// # Errors
    /// [`Error::NoTensor`] with the nearest name; [`Error::CutShort`] if the file was truncated.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, Error> {
        let info = self.get(name)?;
        self.bytes(name, info, 0..info.bytes())
    }

    /// Reads a tensor as `dtype` on `device`, in the stored shape.
    ///
    /// Converts between F64, F32, F16 and BF16, rounding to nearest even. U8, U32 and I64 are not
    /// converted. Needs a few MiB of memory per thread in addition to the result.
    ///
    /// # Errors
    /// [`Error::Unread`] for other conversions; [`Error::NotFinite`] for a NaN or infinite value;
    /// otherwise as [`TensorFiles::read`].
    pub fn tensor(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor, Error> {
        let info = self.get(name)?;
        let flat = self.part(name, 0..info.elements(), dtype, device)?;
        flat.reshape(info.shape.as_slice()).map_err(|e| wrong(name, e))
    }

    /// Like [`TensorFiles::tensor`], for a range of elements, as a flat tensor. Reads only these elements.
    ///
    /// # Errors
    /// [`Error::Rows`] for elements out of range; otherwise as [`TensorFiles::tensor`].
    pub fn part(
        &self,
        name: &str,
        elements: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor, Error> {
        let info = self.get(name)?;
        info.check_range(name, &elements, info.elements())?;
        let (path, shape) = (self.files[info.file].0.as_path(), info.shape.as_slice());
        let fetch = |offset, buffer: &mut [u8]| self.fill(name, info, offset, buffer);
        let load = Load { path, name, shape, elements, device, fetch: &fetch };
        let Some(Scale { name: scale, info: of, block }) = self.scales.get(name) else {
            return load.tensor(info.dtype, dtype);
        };
        let (shape, elements) = (of.shape.as_slice(), 0..of.elements());
        let fetch = |offset, buffer: &mut [u8]| self.fill(scale, of, offset, buffer);
        let scales = Load { path, name: scale, shape, elements, device: &Device::Cpu, fetch: &fetch }
            .tensor(of.dtype, DType::F32)?;
        let values = scales.to_vec1().map_err(|e| wrong(name, e))?;
        load.scaled(&Scales { values, width: shape[1], block: *block }, dtype)
    }

    /// The raw bytes of a byte range of a tensor.
    ///
    /// # Errors
    /// [`Error::Rows`] for bytes out of range; otherwise as [`TensorFiles::read`].
    pub fn read_part(&self, name: &str, bytes: Range<usize>) -> Result<Vec<u8>, Error> {
        let info = self.get(name)?;
        info.check_range(name, &bytes, info.bytes() as usize)?;
        self.bytes(name, info, bytes.start as u64..bytes.end as u64)
    }

    /// Path of the file with a tensor, if present.
    pub fn path_of(&self, name: &str) -> Option<&Path> {
        Some(self.files.get(self.tensors.get(name)?.file)?.0.as_path())
    }

    /// Dtype and shape of a required tensor.
    ///
    /// # Errors
    /// [`Error::NoTensor`] with the nearest name.
    pub fn get(&self, name: &str) -> Result<&TensorInfo, Error> {
        self.tensors.get(name).ok_or_else(|| Error::NoTensor {
            path: self.root.clone(),
            name: name.to_string(),
            nearest: self
                .names()
                .map(|n| (strsim::jaro_winkler(n, name), n))
                .max_by(|a, b| a.0.total_cmp(&b.0))
                .filter(|(score, _)| *score > 0.8)
                .map(|(_, n)| n.to_string()),
        })
    }

    fn bytes(&self, name: &str, info: &TensorInfo, part: Range<u64>) -> Result<Vec<u8>, Error> {
        // The header check bounds the size by the file size.
        let mut out = vec![0u8; (part.end - part.start) as usize];
        let fill =
            |(i, piece): (usize, &mut [u8])| self.fill(name, info, part.start + (i * PIECE) as u64, piece);
        cpu::map(out.chunks_mut(PIECE).enumerate(), fill).into_iter().collect::<Result<(), Error>>()?;
        Ok(out)
    }

    /// Fills `buffer` from byte `offset` of the tensor.
    fn fill(&self, name: &str, info: &TensorInfo, offset: u64, buffer: &mut [u8]) -> Result<(), Error> {
        if let Some(parts) = self.decoded.get(name) {
            return self.fill_decoded(parts, offset, buffer);
        }
        match (info.transposed, info.shape.as_slice()) {
            (true, &[rows, cols]) => self.fill_transposed(name, info, (rows, cols), offset, buffer),
            _ => self.fill_from(name, info, info.place.start + offset, buffer),
        }
    }

    /// Fills `buffer` with values in BF16 from those in MXFP4. `offset` and the length are whole values.
    fn fill_decoded(
        &self,
        parts: &[(String, TensorInfo); 2],
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<(), Error> {
        let (first, end) = (offset as usize / 2, (offset as usize + buffer.len()) / 2);
        let bytes = |(name, info): &(String, TensorInfo), r: Range<usize>| -> Result<Vec<u8>, Error> {
            let mut out = vec![0; r.len()];
            self.fill(name, info, r.start as u64, &mut out)?;
            Ok(out)
        };
        let codes = bytes(&parts[0], first / 2..end.div_ceil(2))?;
        let scales = bytes(&parts[1], first / MXFP4_BLOCK..end.div_ceil(MXFP4_BLOCK))?;
        for (at, value) in (first..end).zip(buffer.chunks_exact_mut(2)) {
            let byte = codes[at / 2 - first / 2];
            let code = if at % 2 == 0 { byte & 15 } else { byte >> 4 };
            let scale = scales[at / MXFP4_BLOCK - first / MXFP4_BLOCK];
            value.copy_from_slice(&mxfp4::value(code, scale).to_le_bytes());
        }
        Ok(())
    }

    /// Fills `buffer` from byte `at` of a tensor's file.
    fn fill_from(&self, name: &str, info: &TensorInfo, at: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let (path, file) = &self.files[info.file];
        file.read_exact_at(buffer, at).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => Error::CutShort { path: path.clone(), name: name.to_string() },
            _ => Error::read(path, e),
        })?;
        self.passing(info.file).into_iter().for_each(|p| p.update(at, buffer));
        Ok(())
    }

    /// As [`TensorFiles::fill`], for `[rows, cols]` whose transpose is in the file: gathers a run of rows from each
    /// line of the file. `offset` and the length are whole elements.
    fn fill_transposed(
        &self,
        name: &str,
        info: &TensorInfo,
        (rows, cols): (usize, usize),
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<(), Error> {
        let width = info.dtype.bitsize() / 8;
        let (start, end) = (offset as usize / width, (offset as usize + buffer.len()) / width);
        let mut line = Vec::new();
        for col in 0..cols {
            // rows whose element of this column lies in the range
            let first = start.saturating_sub(col).div_ceil(cols);
            let last = end.saturating_sub(col).div_ceil(cols);
            if first >= last {
                continue;
            }
            line.resize((last - first) * width, 0);
            let at = info.place.start + ((col * rows + first) * width) as u64;
            self.fill_from(name, info, at, &mut line)?;
            for (row, value) in (first..last).zip(line.chunks_exact(width)) {
                let to = (row * cols + col - start) * width;
                buffer[to..to + width].copy_from_slice(value);
            }
        }
        Ok(())
    }
}

/// The error for a folder without weights, with a hint about files found instead.
fn no_weights(dir: &Path) -> Error {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) => return Error::read(dir, e),
    };
    let mut names: Vec<String> = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    if let Some(pickle) = names.iter().find(|n| is_pickle_name(n)) {
        return Error::Pickle { path: dir.join(pickle) };
    }
    let hint = match names.iter().find(|n| n.ends_with(".safetensors")) {
        Some(other) => format!("; it has {other}: if that is the model, rename it to {SINGLE}"),
        None if names.iter().any(|n| n.ends_with(".gguf")) => {
            "; it has GGUF files: use the safetensors release of the model".to_string()
        }
        None => String::new(),
    };
    Error::NoWeights { dir: dir.to_path_buf(), hint }
}
