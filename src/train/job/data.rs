//! Training and evaluation rows of a job.

use super::job::Job;
use super::rows;
use crate::train::distill;
use ft_data::Dataset;
use ft_recipe::Part;

impl Job {
    /// Loads the training rows.
    pub fn train_data(&self) -> ft_base::Result<Dataset> {
        self.part(Part::Train)
    }

    /// Loads the evaluation rows, if the recipe has any.
    pub fn eval_data(&self) -> ft_base::Result<Option<Dataset>> {
        self.recipe.data.evaluates().then(|| self.part(Part::Eval)).transpose()
    }

    fn part(&self, part: Part) -> ft_base::Result<Dataset> {
        let (d, seed) = (&self.recipe.data, self.recipe.run.seed);
        let (tokenizer, vocab) = (self.tokenizer.as_deref(), self.config.vocab);
        let data = Dataset::load(part, d, &|s| self.recipe.resolve(s), tokenizer, vocab, seed)?;
        rows::tell_data(part.key(d), &data, &self.config)?;
        if part == Part::Eval {
            rows::tell_single(&self.recipe, &data);
        }
        Ok(data)
    }

    /// Checks the teacher of the rows, if the task needs one.
    ///
    /// # Errors
    /// Rows of another tokenizer or chat template.
    pub fn check_rows(&self, train: Option<&Dataset>, eval: Option<&Dataset>) -> ft_base::Result<()> {
        let parts = [(Part::Train, train), (Part::Eval, eval)];
        let mut parts = parts.into_iter().filter_map(|(part, data)| Some((part, data?)));
        parts.try_for_each(|part| distill::check(&self.recipe, self.tokenizer.as_deref(), part))
    }

    /// Loads training and evaluation rows.
    pub fn data(&self) -> ft_base::Result<(Dataset, Option<Dataset>)> {
        let (d, seed) = (&self.recipe.data, self.recipe.run.seed);
        let (tokenizer, vocab) = (self.tokenizer.as_deref(), self.config.vocab);
        let (train, eval) = Dataset::load_both(d, &|s| self.recipe.resolve(s), tokenizer, vocab, seed)?;
        rows::tell_data(Part::Train.key(d), &train, &self.config)?;
        rows::tell_few(&self.recipe, &train);
        if let Some(eval) = &eval {
            rows::tell_shared(&train, eval)?;
            rows::tell_single(&self.recipe, eval);
        }
        // Held-out samples are part of the training data, so warnings about them were printed already.
        if let Some(eval) = eval.as_ref().filter(|_| d.eval_share == 0.0) {
            rows::tell_data(Part::Eval.key(d), eval, &self.config)?;
        }
        Ok((train, eval))
    }
}
