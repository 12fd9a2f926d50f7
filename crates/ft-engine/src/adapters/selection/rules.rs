//! Selection by the `[[train]]` rules of a recipe.

use super::choice::Choice;
use super::selected::Selection;
use crate::adapters::Error;
use crate::model::Config;
use crate::model::modules::{Group, Kind, Module};
use ft_recipe::{IndexSet, LayerSet, LoraSpec, Method, Rule, module_regex};
use regex::Regex;

impl Selection {
    /// Applies a recipe's rules in order; later rules override earlier ones.
    ///
    /// # Errors
    /// A rule that matches nothing; a listed layer or expert not in the model (with a list of
    /// alternatives); LoRA on a norm; LoRA rank 0. Ranges beyond the model are warnings in `notes`.
    pub fn from_rules(config: &Config, rules: &[Rule]) -> Result<Self, Error> {
        let mut s = Self::frozen(config);
        for (i, rule) in rules.iter().enumerate() {
            if rule.is_of_tokens() {
                s.choose_tokens(i, rule)?;
                continue;
            }
            let patterns: Vec<Pattern> = rule
                .modules
                .iter()
                .map(|p| Pattern::parse(p))
                .collect::<Result<_, _>>()
                .map_err(|why| Error::Rule { place: rule.place.to_string(), rule: i, why })?;
            let fail = |why: String| Error::Rule { place: rule.place.to_string(), rule: i, why };
            for absent in absent(rule, config) {
                match absent {
                    Ok(note) => s.notes.push(format!("{}: train.{i}.{note}", rule.place)),
                    Err(why) => return Err(fail(format!("{why}\n  hint: {}", s.inventory(config)))),
                }
            }
            let choice = match rule.method {
                Method::Freeze => Choice::Freeze,
                Method::Full => Choice::Full { lr_scale: rule.lr_scale },
                Method::Lora => Choice::Lora { spec: rule.spec(), lr_scale: rule.lr_scale },
            };
            let mut used = vec![false; patterns.len()];
            for (m, c) in &mut s.modules {
                let in_layers = rule
                    .layers
                    .as_ref()
                    .is_none_or(|set| m.layer.is_some_and(|l| set.contains(l, config.layers)));
                let in_experts =
                    rule.experts.as_ref().is_none_or(|set| m.expert.is_some_and(|e| set.contains(e)));
                if !in_layers || !in_experts {
                    continue;
                }
                let mut hit = false;
                for (p, used) in patterns.iter().zip(&mut used) {
                    if p.matches(m) {
                        (hit, *used) = (true, true);
                    }
                }
                if hit {
                    if rule.method == Method::Lora {
                        check_lora(m, rule.spec()).map_err(fail)?;
                    }
                    *c = choice;
                }
            }
            if let Some(unused) = used.iter().position(|u| !u) {
                let near = s
                    .nearest(&rule.modules[unused])
                    // The name may be correct, with wrong layers or experts.
                    .filter(|n| *n != rule.modules[unused])
                    .map(|n| format!("did you mean {n}? "))
                    .unwrap_or_default();
                return Err(fail(format!(
                    "{:?}{} matches no module of this model\n  hint: {near}{}",
                    rule.modules[unused],
                    match (&rule.layers, &rule.experts) {
                        (None, None) => "",
                        (Some(_), None) => " within these layers",
                        (None, Some(_)) => " within these experts",
                        (Some(_), Some(_)) => " within these layers and experts",
                    },
                    s.inventory(config)
                )));
            }
        }
        let last = rules.len().saturating_sub(1);
        s.tokens_alone()?;
        s.one_switch().and_then(|()| s.tie()).map_err(|why| Error::Rule {
            place: rules.last().map_or(String::new(), |r| r.place.to_string()),
            rule: last,
            why,
        })?;
        Ok(s)
    }

    /// Refuses plain LoRA on the embedding combined with DoRA elsewhere. PEFT's DoRA switch applies to the
    /// whole adapter: plain LoRA then needs neutral magnitudes, and none exists for the embedding.
    fn one_switch(&self) -> Result<(), String> {
        let lora = |c: &Choice| match c {
            Choice::Lora { spec, .. } => Some(spec.dora),
            _ => None,
        };
        let dora = self.modules.iter().any(|(_, c)| lora(c) == Some(true));
        let embedding =
            self.modules.iter().find(|(m, c)| m.group == Group::Embedding && lora(c) == Some(false));
        match embedding {
            Some((m, _)) if dora => Err(format!(
                "not built yet: LoRA on {} beside DoRA on others\n  hint: dora = false in all rules, or the embedding \
                 with method = \"full\"",
                m.name
            )),
            _ => Ok(()),
        }
    }

    /// Makes a tied head and embedding train in full together.
    pub(crate) fn tie(&mut self) -> Result<(), String> {
        if !self.tied {
            return Ok(());
        }
        let ends: Vec<Choice> = self
            .modules
            .iter()
            .filter(|(m, _)| matches!(m.group, Group::Head | Group::Embedding))
            .map(|(_, c)| *c)
            .collect();
        let Some(full) = ends.iter().find(|c| matches!(c, Choice::Full { .. })).copied() else {
            return Ok(());
        };
        if ends.iter().any(|c| matches!(c, Choice::Lora { .. })) {
            return Err(
                "head and embedding of this model are one tensor (tie_word_embeddings): one of them cannot \
                        train in full and the other by LoRA\n  hint: the same method for both, or freeze one"
                    .into(),
            );
        }
        for (m, c) in &mut self.modules {
            if matches!(m.group, Group::Head | Group::Embedding) {
                *c = full;
            }
        }
        Ok(())
    }

    /// Closest group or module name to a misspelled one, if any is close.
    fn nearest(&self, written: &str) -> Option<&str> {
        let known = self.modules.iter().flat_map(|(m, _)| [m.group.name(), m.last()]);
        ft_recipe::names::nearest(written, known)
    }

    /// Available groups, names, layers and experts, for error messages.
    fn inventory(&self, config: &Config) -> String {
        let mut groups: Vec<Group> = self.modules.iter().map(|(m, _)| m.group).collect();
        groups.sort();
        groups.dedup();
        let mut last: Vec<&str> = Vec::new();
        for (m, _) in &self.modules {
            if !last.contains(&m.last()) {
                last.push(m.last());
            }
        }
        let experts = config.moe.as_ref().map_or(String::new(), |m| format!(", experts 0-{}", m.experts - 1));
        format!(
            "groups are {}; names are {}; layers are 0-{}{experts}",
            groups.iter().map(|g| g.name()).collect::<Vec<_>>().join(", "),
            last.join(", "),
            config.layers - 1
        )
    }
}

/// Layers and experts of a rule missing from the model: a warning if a range extends beyond the model, an
/// error if a whole range or a listed index is missing.
fn absent(rule: &Rule, config: &Config) -> Vec<Result<String, String>> {
    let of = |key: &str, set: &IndexSet, count: usize| {
        let there = format!("this model has {key} 0-{}", count - 1);
        match set {
            IndexSet::List(list) => {
                let missing: Vec<String> =
                    list.iter().filter(|i| **i >= count).map(ToString::to_string).collect();
                let is = if missing.len() == 1 { "is" } else { "are" };
                let why = format!("{key}: {} {is} not there: {there}", missing.join(", "));
                (!missing.is_empty()).then_some(Err(why))
            }
            IndexSet::Range(from, to) if *from >= count => {
                let to = to.filter(|to| to != from).map_or(String::new(), |to| format!("-{to}"));
                Some(Err(format!("{key}: {from}{to} is not there: {there}")))
            }
            IndexSet::Range(_, Some(to)) if *to >= count => {
                let missing = if *to == count { format!("{to} is") } else { format!("{count}-{to} are") };
                Some(Ok(format!("{key}: {missing} not there: {there}")))
            }
            IndexSet::Range(..) => None,
        }
    };
    let layers = match &rule.layers {
        Some(LayerSet::Indices(set)) => of("layers", set, config.layers),
        Some(LayerSet::Last(n)) if *n > config.layers => {
            let count = config.layers;
            Some(Ok(format!("layers: the last {n} are asked for: this model has {count}, and all are meant")))
        }
        _ => None,
    };
    let experts = match (&rule.experts, &config.moe) {
        (Some(set), Some(moe)) => of("experts", set, moe.experts),
        _ => None,
    };
    layers.into_iter().chain(experts).collect()
}

pub(crate) fn check_lora(m: &Module, spec: LoraSpec) -> Result<(), String> {
    match m.kind {
        Kind::Norm { .. } => {
            return Err(format!(
                "LoRA on {}: a norm has no matrix\n  hint: train norms with method = \"full\"",
                m.name
            ));
        }
        Kind::Embedding { .. } if spec.dora => {
            return Err(format!("not built yet: DoRA on the embedding ({})", m.name));
        }
        Kind::Embedding { .. } if spec.dropout > 0.0 => {
            return Err(format!(
                "LoRA on {}: PEFT applies no dropout to an embedding\n  hint: a rule of its own with dropout = 0",
                m.name
            ));
        }
        _ => {}
    }
    if spec.rank == 0 { Err(format!("rank 0 on {}", m.name)) } else { Ok(()) }
}

/// One entry of `train.modules`.
enum Pattern {
    Group(Group),
    Last(String),
    Whole(Regex),
}

impl Pattern {
    fn parse(text: &str) -> Result<Self, String> {
        const GROUPS: [Group; 7] = [
            Group::Attention,
            Group::Mlp,
            Group::Experts,
            Group::Router,
            Group::Norms,
            Group::Embedding,
            Group::Head,
        ];
        if let Some(g) = GROUPS.into_iter().find(|g| g.name() == text) {
            return Ok(Pattern::Group(g));
        }
        match module_regex(text) {
            Some(r) => r.map(Pattern::Whole).map_err(|e| format!("modules: {text:?}: {e}")),
            None => Ok(Pattern::Last(text.into())),
        }
    }

    fn matches(&self, m: &Module) -> bool {
        match self {
            Pattern::Group(g) => m.group == *g,
            Pattern::Last(l) => m.last() == l,
            Pattern::Whole(r) => r.is_match(&m.name),
        }
    }
}
