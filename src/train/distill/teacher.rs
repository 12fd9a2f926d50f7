//! Rows with the values of a teacher: forward passes over the rows of a recipe.

use crate::train::Error;
use crate::train::job::Job;
use candle_core::Device;
use ft_base::store::AtomicFolder;
use ft_base::terminal::rows_bar;
use ft_data::{Dataset, Micro, Teacher, TeacherRows, Tokenizer};
use ft_engine::model::{Batch, Decoder};
use ft_engine::walk::{NotFinite, Walk};
use ft_recipe::Part;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A loaded teacher.
pub struct TeacherModel<'a> {
    /// Its name in messages and rows.
    pub name: &'a str,
    pub decoder: &'a Decoder,
    pub tokenizer: Option<&'a Tokenizer>,
    pub device: &'a Device,
}

/// Files written for a recipe.
#[derive(Debug, Default)]
pub struct TeacherFiles {
    /// Rows of all files.
    pub rows: usize,
    /// Targets with values.
    pub targets: usize,
    /// Size of all files.
    pub bytes: u64,
    /// Lines of a recipe to read the files: `train = [..]` and `eval = [..]`.
    pub sources: String,
}

/// Refuses a teacher with another tokenizer than the student's.
fn check_teacher(job: &Job, name: &str, teacher: Option<&Tokenizer>) -> Result<(), Error> {
    let student = &job.recipe.model.source;
    let why = match (job.tokenizer.as_deref(), teacher) {
        (None, None) => None,
        (Some(a), Some(b)) => a.differs(b),
        (None, Some(_)) => Some(format!("{student} has no tokenizer.json to compare")),
        (Some(_), None) => Some(format!("{name} has no tokenizer.json to compare")),
    };
    let hint = "a teacher of the student's family, with the same tokenizer";
    why.map_or(Ok(()), |why| {
        Err(Error::Usage(format!("{name}: another tokenizer than {student}'s: {why}\n  hint: {hint}")))
    })
}

/// Writes the rows of a job's recipe with the `k` most probable tokens of a teacher at every target, one file per
/// source, to a new folder.
///
/// # Errors
/// A teacher with another tokenizer, or with non-finite logits; a task with losses of whole documents; unreadable rows;
/// device errors; an existing folder.
pub fn write_teacher(
    job: &Job,
    teacher: &TeacherModel<'_>,
    k: usize,
    out: &Path,
) -> ft_base::Result<TeacherFiles> {
    let recipe = &job.recipe;
    if recipe.task.has_objective() {
        let why = "ft logits has values of tokens; this task's losses are of whole documents";
        return Err(Error::at(recipe, "task", why).into());
    }
    if !(1..=Teacher::MOST_KEPT).contains(&k) {
        return Err(Error::Usage(format!("--top-k {k}: 1 to {}", Teacher::MOST_KEPT)).into());
    }
    check_teacher(job, teacher.name, teacher.tokenizer)?;
    let folder = AtomicFolder::begin_named(out)?;
    folder.refuse_occupied("another folder, or remove this one")?;
    let (train, eval) = job.data()?;
    let mut files = TeacherFiles::default();
    let mut pass = Pass { job, teacher, k, by: identity(job, teacher.name), folder: folder.path(), out };
    pass.part(Part::Train, &train, &mut files)?;
    if let Some(eval) = &eval {
        pass.part(Part::Eval, eval, &mut files)?;
    }
    folder.commit()?;
    Ok(files)
}

/// Identity of teacher and tokenizer in the rows. The chat template counts if some rows used it.
fn identity(job: &Job, name: &str) -> Value {
    let identity = job.tokenizer.as_ref().map(|t| t.identity());
    let data = &job.recipe.data;
    let has_template = identity.as_ref().is_some_and(|i| i.template.is_some());
    let chat = data.all_sources().any(|s| s.is_chat(has_template));
    let template = identity.as_ref().and_then(|i| i.template.clone()).filter(|_| chat);
    json!({"model": name, "tokenizer": identity.map(|i| i.vocabulary), "template": template})
}

/// A pass over the rows of a recipe.
struct Pass<'a> {
    job: &'a Job,
    teacher: &'a TeacherModel<'a>,
    k: usize,
    by: Value,
    folder: PathBuf,
    /// The final name of the folder.
    out: &'a Path,
}

impl Pass<'_> {
    /// Writes every sample of a part once.
    fn part(&mut self, part: Part, data: &Dataset, files: &mut TeacherFiles) -> ft_base::Result<()> {
        let word = if part == Part::Train { "train" } else { "eval" };
        let bar = rows_bar();
        bar.set_length(data.samples.len() as u64);
        files.sources += &format!("{word} = [\n");
        for (i, samples) in data.samples.ranges().into_iter().enumerate() {
            let name = format!("{word}-{i}.jsonl.zst");
            let mut rows = TeacherRows::create(&self.folder.join(&name), self.by.clone())?;
            let samples: Vec<u32> = samples.map(|i| i as u32).collect();
            for chunk in samples.chunks(self.job.recipe.run.micro_rows.count().max(1)) {
                files.targets += self.rows((word, data), chunk, &mut rows)?;
                bar.inc(chunk.len() as u64);
            }
            let (count, bytes) = rows.finish()?;
            files.rows += count;
            files.bytes += bytes;
            files.sources += &self.source(part, i, &name);
        }
        bar.finish_and_clear();
        files.sources += "]\n";
        Ok(())
    }

    /// The line of a recipe to read a file. A source's weight counts in its samples of an epoch.
    fn source(&self, part: Part, i: usize, name: &str) -> String {
        let source = toml::Value::from(self.out.join(name).display().to_string());
        let weight = self.job.recipe.data.sources(part).get(i).map_or(1.0, |s| s.weight);
        let weight = if part == Part::Eval || weight == 1.0 {
            String::new()
        } else {
            format!(", weight = {weight:?}")
        };
        format!("  {{ source = {source}, format = \"tokens\"{weight} }},\n")
    }

    /// Writes samples with the teacher's values; returns the number of targets.
    fn rows(
        &self,
        (part, data): (&str, &Dataset),
        samples: &[u32],
        to: &mut TeacherRows,
    ) -> ft_base::Result<usize> {
        let TeacherModel { name, decoder, device, .. } = self.teacher;
        let m = Micro::of_samples(data, samples)?;
        let batch = Batch::new(&decoder.config, (&m).into(), (0, 0), None, device)?;
        let top = Walk::new(decoder, None, 0).top(&batch, (self.k, self.job.config.vocab))?;
        let mut left = &top[..];
        for sample in samples {
            let Some(e) = data.samples.get(*sample as usize)? else { continue };
            let (own, rest) = left.split_at(e.targets().min(left.len()));
            if own.iter().flatten().any(|(_, logit)| !logit.is_finite()) {
                let what = format!("{name}, data.{part}.{} line {}", e.source, e.line);
                return Err(NotFinite { what, hint: "hint: compare with ft chat --dtype f32" }.into());
            }
            to.push(&e, own)?;
            left = rest;
        }
        Ok(top.len())
    }
}
