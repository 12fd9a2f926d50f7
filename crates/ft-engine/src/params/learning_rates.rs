//! Peak learning rates of a run: the single source for reports, checks and the optimizer.

use super::params::Params;
use crate::adapters::{Error, Part, Selection};
use ft_recipe::{Method, Recipe};
use serde::Serialize;
use std::fmt;

/// A peak learning rate and the tensors trained with it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LearningRate {
    /// Peak of the schedule, scale included.
    pub lr: f64,
    /// Training method of these tensors.
    #[serde(serialize_with = "word")]
    pub method: Method,
    /// Scale included in `lr`: the rule's `lr_scale`, times `lr_scale_b` under LoRA+.
    pub lr_scale: f64,
    /// Whether LoRA+ scales the rate: LoRA's B and magnitudes.
    pub lora_b: bool,
    /// Whether the tensors are token rows.
    pub tokens: bool,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of values.
    pub parameters: u64,
    /// Origin: `optimizer.lr`, or `default` for the method's default.
    pub from: &'static str,
}

fn word<S: serde::Serializer>(method: &Method, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(method.word())
}

impl LearningRate {
    /// Peak learning rate before scaling.
    pub fn base(&self, o: &ft_recipe::Optimizer) -> f64 {
        o.peak_lr(self.method)
    }
}

/// Formats as `2e-4 (LoRA, by default, lr_scale 0.5)`.
impl fmt::Display for LearningRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let method = match self.method {
            Method::Full => "in full",
            _ if self.lora_b => "LoRA's B",
            _ if self.tokens => "rows of tokens",
            _ => "LoRA",
        };
        let from = if self.from == "default" { "by default" } else { self.from };
        write!(f, "{} ({method}, {from}", short(self.lr))?;
        if self.lr_scale != 1.0 {
            write!(f, ", lr_scale {}", self.lr_scale)?;
        }
        f.write_str(")")
    }
}

/// Formats a learning rate with up to four digits.
pub fn short(lr: f64) -> String {
    let text = format!("{lr:.3e}");
    match text.split_once('e') {
        Some((digits, power)) => format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.')),
        None => text,
    }
}

/// Formats all rates in one line.
pub fn line(rates: &[LearningRate]) -> String {
    rates.iter().map(LearningRate::to_string).collect::<Vec<_>>().join(", ")
}

/// Groups tensors, given as part, scale, whether LoRA+ scales it, and number of values, by learning rate; highest
/// first.
fn collect(
    o: &ft_recipe::Optimizer,
    parts: impl Iterator<Item = (Part, f64, bool, u64)>,
) -> Vec<LearningRate> {
    let mut rates: Vec<LearningRate> = Vec::new();
    for (part, lr_scale, plus, parameters) in parts {
        let (method, lora_b) = (part.method(), plus && o.lr_scale_b != 1.0);
        let (lr_scale, tokens) = (o.factor(lr_scale, lora_b), part == Part::Rows);
        let same = |r: &&mut LearningRate| {
            (r.method, r.lora_b, r.tokens, r.lr_scale) == (method, lora_b, tokens, lr_scale)
        };
        match rates.iter_mut().find(same) {
            Some(r) => {
                r.tensors += 1;
                r.parameters += parameters;
            }
            None => rates.push(LearningRate {
                lr: o.peak_lr(method) * lr_scale,
                method,
                lr_scale,
                lora_b,
                tokens,
                tensors: 1,
                parameters,
                from: if o.lr.is_some() { "optimizer.lr" } else { "default" },
            }),
        }
    }
    rates.sort_by(|a, b| b.lr.total_cmp(&a.lr));
    rates
}

impl Selection {
    /// Learning rates of the selection, highest first.
    pub fn learning_rates(&self, o: &ft_recipe::Optimizer) -> Vec<LearningRate> {
        let parts = self.parts();
        collect(o, parts.iter().map(|p| (p.part, p.lr_scale, p.plus, p.elements() as u64)))
    }

    /// As [`Selection::learning_rates`], with validation.
    ///
    /// # Errors
    /// `min_lr` above one of the rates; a rate that is zero or infinite in f32.
    pub fn check_learning_rates(&self, recipe: &Recipe) -> Result<Vec<LearningRate>, Error> {
        let o = &recipe.optimizer;
        let rates = self.learning_rates(o);
        for r in &rates {
            let (base, method) = (r.base(o), r.method.word());
            if o.min_lr > base {
                let place = recipe.place("optimizer.min_lr").to_string();
                let why = format!(
                    "min_lr = {:?} is above the learning rate {base:?} (method = \"{method}\", {})\n  \
                    hint: the learning \
                     rate falls to min_lr: a lower one, or set optimizer.lr",
                    o.min_lr, r.from
                );
                return Err(Error::Key { place, why });
            }
            if !(r.lr as f32 > 0.0 && (r.lr as f32).is_finite()) {
                let place = recipe.place("optimizer.lr").to_string();
                let why = format!(
                    "the learning rate {base:?} x lr_scale {:?} is {:?} in f32, which updates are computed in",
                    r.lr_scale, r.lr as f32
                );
                return Err(Error::Key { place, why });
            }
        }
        Ok(rates)
    }
}

impl Params {
    /// As [`Selection::learning_rates`].
    pub fn learning_rates(&self, o: &ft_recipe::Optimizer) -> Vec<LearningRate> {
        collect(o, self.tensors.iter().map(|t| (t.part, t.lr_scale, t.plus, t.elements() as u64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapters::Trained;

    const RULES: &str = "[model]\nsource = \"m\"\n[[data.train]]\nsource = \"d\"\nformat = \"text\"\n\
        [[train]]\nmodules = [\"attention\"]\n[[train]]\nmodules = [\"mlp\"]\nlr_scale = 0.3\n\
        [[train]]\nmodules = [\"norms\"]\nmethod = \"full\"\n";

    fn selection(recipe: &Recipe) -> anyhow::Result<Selection> {
        let dir = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("data/model");
        let config = crate::model::Config::load(&dir, &serde_json::Map::new())?;
        Ok(Selection::from_rules(&config, &recipe.train)?)
    }

    fn shown(set: &[&str]) -> anyhow::Result<String> {
        let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
        let recipe = Recipe::parse(RULES, "r.toml", &set)?;
        let rates = selection(&recipe)?.check_learning_rates(&recipe)?;
        let all: usize = rates.iter().map(|r| r.tensors).sum();
        assert_eq!(all, selection(&recipe)?.trained().len());
        Ok(line(&rates))
    }

    /// LoRA+: B has a learning rate of its own.
    #[test]
    fn lr_scale_b_gives_b_a_rate_of_its_own() -> anyhow::Result<()> {
        assert_eq!(
            shown(&["optimizer.lr_scale_b=16"])?,
            "3.2e-3 (LoRA's B, by default, lr_scale 16), 9.6e-4 (LoRA's B, by default, lr_scale 4.8), 2e-4 (LoRA, by \
             default), 6e-5 (LoRA, by default, lr_scale 0.3), 1e-5 (in full, by default)"
        );
        assert!(shown(&["optimizer.lr_scale_b=1e-300"]).is_err());
        Ok(())
    }

    /// LoRA+ is of B and of magnitudes, as in PEFT; of an embedding, B is the random factor.
    #[test]
    fn lora_plus_is_of_b_and_magnitudes_but_of_no_embedding() -> anyhow::Result<()> {
        let own = ["train.2.modules=['embedding']", "train.2.method=lora"];
        for (set, [b, magnitudes]) in [(&["lora.dora=true"][..], [true; 2]), (&own, [true, false])] {
            let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
            let trained = selection(&Recipe::parse(RULES, "r.toml", &set)?)?.trained();
            let any = |part| trained.iter().any(|t| t.part == part && t.plus);
            assert_eq!([any(Part::B), any(Part::Magnitude)], [b, magnitudes], "{set:?}");
            let scaled =
                |t: &Trained| matches!(t.part, Part::B | Part::Magnitude) && !t.name.contains("embed");
            assert!(trained.iter().all(|t| t.plus == scaled(t)), "{set:?}");
        }
        Ok(())
    }

    /// A rule for one method does not affect another method's default.
    #[test]
    fn the_default_learning_rate_is_by_method() -> anyhow::Result<()> {
        assert_eq!(
            shown(&[])?,
            "2e-4 (LoRA, by default), 6e-5 (LoRA, by default, lr_scale 0.3), 1e-5 (in full, by default)"
        );
        assert_eq!(
            shown(&["optimizer.lr=3e-3"])?,
            "3e-3 (in full, optimizer.lr), 3e-3 (LoRA, optimizer.lr), 9e-4 (LoRA, optimizer.lr, lr_scale 0.3)"
        );
        Ok(())
    }

    #[test]
    fn learning_rates_out_of_range_are_refused() -> anyhow::Result<()> {
        for set in [
            // between the defaults of LoRA and full training
            &["optimizer.min_lr=1e-4"][..],
            &["optimizer.lr=1e-30", "train.1.lr_scale=1e-30"],
            &["optimizer.lr=1e30", "train.1.lr_scale=1e30"],
        ] {
            assert!(shown(set).is_err(), "{set:?}");
        }
        assert!(shown(&["optimizer.min_lr=1e-5"]).is_ok());
        Ok(())
    }
}
