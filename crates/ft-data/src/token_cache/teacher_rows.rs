//! Files of tokens with a teacher's values, as format `tokens` reads them: compressed lines of JSON.

use crate::error::Error;
use crate::shape::example::Example;
use ft_base::store::AtomicFile;
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Bytes of text per compressed frame.
const FRAME: usize = 8 << 20;

/// Most probable tokens after each token, with logarithms of their probabilities.
pub type TopTokens = Vec<(u32, f32)>;

/// A row of a file.
#[derive(Serialize)]
struct Row<'a> {
    input_ids: &'a [u32],
    labels: &'a [i32],
    #[serde(skip_serializing_if = "<[f32]>::is_empty")]
    weights: &'a [f32],
    teacher_ids: Vec<Vec<u32>>,
    teacher_logits: Vec<Vec<f32>>,
    teacher: &'a Value,
}

/// A file under construction.
pub struct TeacherRows {
    file: AtomicFile,
    path: PathBuf,
    /// Identity of teacher and tokenizer, the same in each row.
    by: Value,
    text: Vec<u8>,
    /// Rows written.
    pub rows: usize,
    /// Bytes written.
    pub bytes: u64,
}

impl TeacherRows {
    /// Starts a file. `by` is the identity of teacher and tokenizer.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path, by: Value) -> Result<Self, ft_base::store::Error> {
        let file = AtomicFile::create(path, None)?;
        Ok(Self { file, path: path.into(), by, text: Vec::new(), rows: 0, bytes: 0 })
    }

    /// Appends a sample. `top` has one entry per target, in order.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn push(&mut self, e: &Example, top: &[TopTokens]) -> ft_base::Result<()> {
        let (mut ids, mut logits) = (vec![Vec::new(); e.ids.len()], vec![Vec::new(); e.ids.len()]);
        for (query, top) in e.queries().zip(top) {
            (ids[query], logits[query]) = top.iter().copied().unzip();
        }
        let (input_ids, labels, weights) = (&e.ids, &e.labels, &e.weights);
        let row =
            Row { input_ids, labels, weights, teacher_ids: ids, teacher_logits: logits, teacher: &self.by };
        serde_json::to_writer(&mut self.text, &row).map_err(|e| Error::read(&self.path, e.into()))?;
        self.text.push(b'\n');
        self.rows += 1;
        if self.text.len() >= FRAME { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> ft_base::Result<()> {
        let frame = zstd::encode_all(&self.text[..], 0).map_err(|e| Error::read(&self.path, e))?;
        self.text.clear();
        self.bytes += frame.len() as u64;
        Ok(self.file.write(&frame)?)
    }

    /// Finishes the file. Returns rows and bytes.
    ///
    /// # Errors
    /// As [`TeacherRows::push`].
    pub fn finish(mut self) -> ft_base::Result<(usize, u64)> {
        self.flush()?;
        self.file.commit()?;
        Ok((self.rows, self.bytes))
    }
}
