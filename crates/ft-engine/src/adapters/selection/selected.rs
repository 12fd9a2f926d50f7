//! Modules of a model with their training methods, and the trained tensors.

use super::choice::Choice;
use super::tokens::Tokens;
use super::trained::{Fused, Part, Trained, TrainedPart, tensor_name};
use crate::model::Config;
use crate::model::modules::{Group, Kind, Module, constants, modules};
use ft_recipe::LoraSpec;
use std::collections::HashSet;
use std::sync::Arc;

/// All modules of a model with their training method.
#[derive(Clone, Debug)]
pub struct Selection {
    /// Modules in the order of the forward pass.
    pub modules: Vec<(Module, Choice)>,
    /// Tensors outside all rules, never trained.
    pub constants: Vec<Module>,
    /// Number of decoder layers.
    pub layers: usize,
    /// Names of the outputs of a score head, if the model has one.
    pub scores: Option<Vec<String>>,
    /// Whether the head shares the embedding's weight.
    pub tied: bool,
    /// Tokens with trained rows, if any.
    pub tokens: Tokens,
    /// Warnings about rules: ranges of layers or experts beyond the model, rows without gradient.
    pub notes: Vec<String>,
}

/// Place of a trained tensor in an adapter of parameters.
fn fused(t: &TrainedPart<'_>, wrapped: &HashSet<&str>) -> Option<Fused> {
    let parameter = Arc::clone(t.module.parameter.as_ref()?);
    let slice = parameter.slice.as_ref();
    let held = match t.part {
        Part::A | Part::B => true,
        Part::Weight | Part::Bias => slice.is_none(),
        Part::Magnitude | Part::Rows => false,
    };
    let nested = slice.is_some_and(|s| !s.outer && wrapped.contains(s.block.as_str()));
    held.then_some(Fused { parameter, expert: t.module.expert.unwrap_or(0), nested })
}

impl Selection {
    /// All modules frozen.
    pub fn frozen(config: &Config) -> Self {
        Self {
            modules: modules(config).into_iter().map(|m| (m, Choice::Freeze)).collect(),
            constants: constants(config),
            layers: config.layers,
            scores: config.scores.clone(),
            tied: config.tied,
            tokens: Tokens::default(),
            notes: Vec::new(),
        }
    }

    /// Trains a score head in full, unless it does already.
    ///
    /// # Errors
    /// The head, if a rule freezes it or trains it otherwise.
    pub fn train_scores(&mut self, ruled: bool) -> Result<(), String> {
        for (m, choice) in self.modules.iter_mut().filter(|(m, _)| m.is_score()) {
            match choice {
                Choice::Full { .. } => {}
                Choice::Freeze if !ruled => *choice = Choice::Full { lr_scale: 1.0 },
                _ => {
                    let why = "a score head trains in full\n  hint: leave head out of the rules, or give it a rule of \
                               its own with method = \"full\"";
                    return Err(format!("{}: {why}", m.name));
                }
            }
        }
        Ok(())
    }

    /// Trained tensors in the order of the forward pass.
    ///
    /// A tied head and embedding trained in full are one tensor, under the embedding's name.
    pub fn trained(&self) -> Vec<Trained> {
        let wrapped = self.wrapped();
        let named = |t: TrainedPart<'_>| Trained {
            fused: fused(&t, &wrapped),
            name: tensor_name(t.module, t.part),
            module: t.module.name.clone(),
            part: t.part,
            shape: t.shape().to_vec(),
            unit: t.module.unit(self.layers),
            expert: t.module.expert,
            cut: t.module.cut,
            lr_scale: t.lr_scale,
            plus: t.plus,
            matrix: t.matrix,
        };
        self.parts().into_iter().map(named).collect()
    }

    /// Blocks with an outer LoRA adapter on a parameter.
    fn wrapped(&self) -> HashSet<&str> {
        let outer = |(m, c): &'_ (Module, Choice)| {
            m.slice().is_some_and(|s| s.outer) && matches!(c, Choice::Lora { .. })
        };
        let blocks = self.modules.iter().filter(|m| outer(m)).filter_map(|(m, _)| m.slice());
        blocks.map(|s| s.block.as_str()).collect()
    }

    /// As [`Selection::trained`], but without allocating names: plans call this many times.
    pub fn parts(&self) -> Vec<TrainedPart<'_>> {
        let mut out = Vec::new();
        for (m, choice) in &self.modules {
            let mut choice = *choice;
            // A tied head trained in full is the embedding's tensor.
            if self.tied && m.group == Group::Head && matches!(choice, Choice::Full { .. }) {
                choice = Choice::Freeze;
            }
            let mut add = |part, shape: &[usize], lr_scale, matrix| {
                let (mut dims, rank) = ([1; 3], shape.len().min(3));
                dims[..rank].copy_from_slice(&shape[..rank]);
                // As PEFT: A of an embedding is its zero factor.
                let plus =
                    matches!(part, Part::B | Part::Magnitude) && !matches!(m.kind, Kind::Embedding { .. });
                out.push(TrainedPart { module: m, part, dims, rank, lr_scale, plus, matrix });
            };
            match choice {
                Choice::Freeze => {}
                Choice::Full { lr_scale } => {
                    let shape = m.weight_shape();
                    add(Part::Weight, &shape, lr_scale, shape.len() > 1);
                    if let Some(n) = m.bias() {
                        add(Part::Bias, &[n], lr_scale, false);
                    }
                }
                Choice::Lora { spec, lr_scale } => {
                    let (o, i) = match m.kind {
                        Kind::Linear { out, inp, .. } => (out, inp),
                        Kind::Embedding { vocab, dim } => (dim, vocab),
                        Kind::Norm { .. }
                        | Kind::Conv { .. }
                        | Kind::Vector { .. }
                        | Kind::Constant { .. } => continue,
                    };
                    if m.a_of() == m.name {
                        add(Part::A, &[spec.rank, i], lr_scale, true);
                    }
                    add(Part::B, &[o, spec.rank], lr_scale, true);
                    if spec.dora {
                        add(Part::Magnitude, &[o], lr_scale, false);
                    }
                }
                Choice::Rows { count, lr_scale } => {
                    add(Part::Rows, &[count, m.cols()], lr_scale, true);
                }
            }
        }
        out
    }

    /// Modules with weights of their own: a tied head has none.
    pub fn with_weights(&self) -> impl Iterator<Item = &(Module, Choice)> {
        self.modules.iter().filter(|(m, _)| !(self.tied && m.group == Group::Head))
    }

    /// Modules with LoRA.
    pub fn loras(&self) -> impl Iterator<Item = (&Module, &LoraSpec)> {
        self.modules.iter().filter_map(|(m, c)| match c {
            Choice::Lora { spec, .. } => Some((m, spec)),
            _ => None,
        })
    }

    /// Training method of a module, by name.
    pub fn choice(&self, name: &str) -> Choice {
        self.modules.iter().find(|(m, _)| m.name == name).map_or(Choice::Freeze, |(_, c)| *c)
    }

    /// Whether every tensor of the model trains in full.
    pub fn everything_full(&self) -> bool {
        self.modules.iter().all(|(_, c)| matches!(c, Choice::Full { .. }))
    }

    /// Whether a tied head and embedding train in full.
    pub fn tied_in_full(&self) -> bool {
        let head = |(m, c): &(Module, Choice)| m.group == Group::Head && matches!(c, Choice::Full { .. });
        self.tied && self.modules.iter().any(head)
    }

    /// Name of the only module of a group, such as the embedding or the head.
    pub fn name_of(&self, group: Group) -> &str {
        self.modules.iter().find(|(m, _)| m.group == group).map_or("", |(m, _)| m.name.as_str())
    }
}
