//! Selection by the `[[train]]` rules of a recipe.

use super::choice::Choice;
use super::selected::Selection;
use crate::adapters::Error;
use crate::model::Config;
use crate::model::modules::{Group, Kind, Module};
use ft_recipe::{GROUPS, IndexSet, LayerSet, LoraSpec, Method, Rule, module_regex};
use regex::Regex;
use std::collections::{BTreeSet, HashMap};

/// Hints for LoRA on the embedding, and on parameters, whose adapters PEFT makes without DoRA.
const PLAIN_EMBEDDING: &str = "dora = false in all rules, or the embedding with method = \"full\"";
const PLAIN_PARAMETERS: &str = "dora = false in all rules, or leave experts and routers out";

impl Selection {
    /// Applies a recipe's rules in order; later rules override earlier ones.
    ///
    /// # Errors
    /// A rule without a match; a listed layer or expert not in the model (with a list of alternatives); LoRA on a norm;
    /// LoRA rank 0. Ranges beyond the model are warnings in `notes`, as are rules overridden by later ones for all
    /// modules.
    pub fn from_rules(config: &Config, rules: &[Rule]) -> Result<Self, Error> {
        let mut s = Self::frozen(config);
        // rule of each module's choice
        let mut chosen_by = vec![None; s.modules.len()];
        for (i, rule) in rules.iter().enumerate() {
            if rule.is_of_tokens() {
                s.choose_tokens(i, rule)?;
            } else {
                s.apply(config, i, rule, &mut chosen_by).map_err(|why| rule_error(rules, i, why))?;
            }
        }
        s.tokens_alone()?;
        for (i, rule) in rules.iter().enumerate() {
            if !rule.is_of_tokens() && !chosen_by.contains(&Some(i)) {
                s.notes.push(format!(
                    "{}: train.{i} does nothing: later rules say otherwise for all of its modules\n  hint: a later \
                     rule wins: general rules go first",
                    rule.place
                ));
            }
        }
        let head = s.modules.iter().position(|(m, _)| m.is_score()).and_then(|at| chosen_by[at]);
        let refused = |c: Conflict| {
            // the later of both rules completes the conflict
            let rule = c.modules.map(|m| chosen_by[m]).into_iter().max().flatten().unwrap_or(0);
            rule_error(rules, rule, c.why)
        };
        s.fused_alike().and_then(|()| s.bare_alone()).map_err(refused)?;
        s.train_scores(head.is_some()).map_err(|why| rule_error(rules, head.unwrap_or(0), why))?;
        s.one_switch().and_then(|()| s.tie()).map_err(refused)?;
        Ok(s)
    }

    /// Applies one rule for modules; returns the reason for a refusal.
    fn apply(
        &mut self,
        config: &Config,
        index: usize,
        rule: &Rule,
        chosen_by: &mut [Option<usize>],
    ) -> Result<(), String> {
        let patterns: Vec<Pattern> =
            rule.modules.iter().map(|p| Pattern::parse(p)).collect::<Result<_, _>>()?;
        for absent in absent(rule, config) {
            match absent {
                Ok(note) => self.notes.push(format!("{}: train.{index}.{note}", rule.place)),
                Err(why) => return Err(format!("{why}\n  hint: {}", self.inventory(config))),
            }
        }
        let choice = match rule.method {
            Method::Freeze => Choice::Freeze,
            Method::Full => Choice::Full { lr_scale: rule.lr_scale },
            Method::Lora => Choice::Lora { spec: rule.spec(), lr_scale: rule.lr_scale },
        };
        let within = |m: &Module| {
            let layer = |set: &LayerSet| m.layer.is_some_and(|l| set.contains(l, config.layers));
            let expert = |set: &IndexSet| m.expert.is_some_and(|e| set.contains(e));
            rule.layers.as_ref().is_none_or(layer) && rule.experts.as_ref().is_none_or(expert)
        };
        let mut used = vec![false; patterns.len()];
        let modules = self.modules.iter_mut().zip(chosen_by).filter(|((m, _), _)| within(m));
        for ((m, c), by) in modules {
            let mut hit = false;
            for (p, used) in patterns.iter().zip(&mut used) {
                if p.matches(m) {
                    (hit, *used) = (true, true);
                }
            }
            if hit {
                if rule.method == Method::Lora {
                    check_lora(m, rule.spec())?;
                }
                (*c, *by) = (choice, Some(index));
            }
        }
        match used.iter().position(|u| !u) {
            Some(unused) => Err(self.no_match(config, rule, &rule.modules[unused])),
            None => Ok(()),
        }
    }

    /// Error text for an entry of `modules` without matches.
    fn no_match(&self, config: &Config, rule: &Rule, written: &str) -> String {
        // The name may be correct, with wrong layers or experts.
        let near = self.nearest(written).filter(|n| *n != written);
        let near = near.map(|n| format!("did you mean {n}? ")).unwrap_or_default();
        let within = match (&rule.layers, &rule.experts) {
            (None, None) => "",
            (Some(_), None) => " within these layers",
            (None, Some(_)) => " within these experts",
            (Some(_), Some(_)) => " within these layers and experts",
        };
        let inventory = self.inventory(config);
        format!("{written:?}{within} matches no module of this model\n  hint: {near}{inventory}")
    }

    /// Refuses plain LoRA on the embedding combined with DoRA elsewhere. PEFT's DoRA switch applies to the
    /// whole adapter: plain LoRA then needs neutral magnitudes, and none exists for the embedding.
    fn one_switch(&self) -> Result<(), Conflict> {
        let first = |dora: bool, of: &dyn Fn(&Module) -> bool| {
            let is = |c: &Choice| matches!(c, Choice::Lora { spec, .. } if spec.dora == dora);
            self.modules.iter().position(|(m, c)| is(c) && of(m))
        };
        let Some(dora) = first(true, &|_| true) else { return Ok(()) };
        if let Some(parameter) = first(false, &|m| m.parameter.is_some()) {
            let why = format!(
                "LoRA on {} beside DoRA on others: PEFT adapts it as a parameter, without DoRA in the whole adapter\n  \
                 hint: {PLAIN_PARAMETERS}",
                self.modules[parameter].0.name
            );
            return Err(Conflict { modules: [dora, parameter], why });
        }
        let Some(embedding) = first(false, &|m| m.group == Group::Embedding) else { return Ok(()) };
        let why = format!(
            "not built yet: LoRA on {} beside DoRA on others\n  hint: {PLAIN_EMBEDDING}",
            self.modules[embedding].0.name
        );
        Err(Conflict { modules: [dora, embedding], why })
    }

    /// Refuses choices unfit for an adapter of all experts of a layer: different ones for experts or their linears, and
    /// training in full, unless everything trains in full.
    fn fused_alike(&self) -> Result<(), Conflict> {
        let (mut first, full) = (HashMap::new(), self.everything_full());
        for (at, (m, c)) in self.modules.iter().enumerate() {
            let (Some(slice), Some(parameter)) = (m.slice(), &m.parameter) else { continue };
            let of = *first.entry(&parameter.name).or_insert(at);
            if self.modules[of].1 != *c {
                let why = format!(
                    "{} and {} train differently, and adapters of this family are of all experts of a layer at once\n  \
                     hint: rules for experts without `experts`, for gate_proj and up_proj together",
                    self.modules[of].0.name, m.name
                );
                return Err(Conflict { modules: [of, at], why });
            }
            if matches!(c, Choice::Full { .. }) && !full {
                let why = format!(
                    "{}: an expert that trains in full has no place in an adapter of {}\n  hint: method = \"lora\" for \
                     experts, or train everything in full",
                    m.name, slice.block
                );
                return Err(Conflict { modules: [at, at], why });
            }
        }
        Ok(())
    }

    /// Refuses a trained bare parameter, unless everything trains in full.
    fn bare_alone(&self) -> Result<(), Conflict> {
        let trains = |(m, c): &(Module, Choice)| m.is_bare() && *c != Choice::Freeze;
        let Some(at) = self.modules.iter().position(trains).filter(|_| !self.everything_full()) else {
            return Ok(());
        };
        let why = format!(
            "{} has no place in an adapter, and trains in full only with the whole model\n  hint: modules = \
             [\"/.*/\"] with method = \"full\", or leave it out",
            self.modules[at].0.name
        );
        Err(Conflict { modules: [at, at], why })
    }

    /// Makes a tied head and embedding train in full together.
    pub(crate) fn tie(&mut self) -> Result<(), Conflict> {
        if !self.tied {
            return Ok(());
        }
        let is_table = |m: &Module| matches!(m.group, Group::Head | Group::Embedding);
        let table =
            |wanted: fn(&Choice) -> bool| self.modules.iter().position(|(m, c)| is_table(m) && wanted(c));
        let Some(full) = table(|c| matches!(c, Choice::Full { .. })) else { return Ok(()) };
        if let Some(lora) = table(|c| matches!(c, Choice::Lora { .. })) {
            let why = "head and embedding of this model are one tensor (tie_word_embeddings): one of them cannot \
                       train in full and the other by LoRA\n  hint: the same method for both, or freeze one";
            return Err(Conflict { modules: [full, lora], why: why.into() });
        }
        let choice = self.modules[full].1;
        self.modules.iter_mut().filter(|(m, _)| is_table(m)).for_each(|(_, c)| *c = choice);
        Ok(())
    }

    /// Closest group or module name to a misspelled one, if any is close.
    fn nearest(&self, written: &str) -> Option<&str> {
        let known = self.modules.iter().flat_map(|(m, _)| [m.group.name(), m.last()]);
        ft_recipe::nearest(written, known)
    }

    /// Available groups, names, layers and experts, for error messages.
    fn inventory(&self, config: &Config) -> String {
        let groups: BTreeSet<Group> = self.modules.iter().map(|(m, _)| m.group).collect();
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

/// Two modules with incompatible choices.
pub(crate) struct Conflict {
    /// Indices of the modules.
    modules: [usize; 2],
    pub(crate) why: String,
}

fn rule_error(rules: &[Rule], rule: usize, why: String) -> Error {
    Error::Rule { place: rules[rule].place.to_string(), rule, why }
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
    if m.parameter.is_some() && (spec.dora || spec.dropout > 0.0) {
        let (what, hint) = if spec.dora {
            ("DoRA", PLAIN_PARAMETERS)
        } else {
            ("dropout", "a rule of its own with dropout = 0")
        };
        return Err(format!(
            "{what} on {}: PEFT adapts it as a parameter, without {what}\n  hint: {hint}",
            m.name
        ));
    }
    match m.kind {
        Kind::Conv { .. } | Kind::Vector { .. } | Kind::Constant { .. } => {
            return Err(format!(
                "LoRA on {}: it is no matrix of a linear\n  hint: freeze it, or train everything with \
                 method = \"full\"",
                m.name
            ));
        }
        Kind::Norm { .. } => {
            return Err(format!(
                "LoRA on {}: a norm has no matrix\n  hint: train norms with method = \"full\"",
                m.name
            ));
        }
        Kind::Embedding { .. } if m.group == Group::PerLayer => {
            return Err(format!(
                "not built yet: LoRA on the table of per-layer inputs ({})\n  hint: freeze it, or method = \"full\"",
                m.name
            ));
        }
        Kind::Embedding { .. } if spec.dora => {
            return Err(format!(
                "not built yet: DoRA on the embedding ({})\n  hint: {PLAIN_EMBEDDING}",
                m.name
            ));
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
    Group(&'static str),
    Last(String),
    Whole(Regex),
}

impl Pattern {
    fn parse(text: &str) -> Result<Self, String> {
        if let Some((group, _)) = GROUPS.iter().find(|(name, _)| *name == text) {
            return Ok(Pattern::Group(group));
        }
        match module_regex(text) {
            Some(r) => r.map(Pattern::Whole).map_err(|e| format!("modules: {text:?}: {e}")),
            None => Ok(Pattern::Last(text.into())),
        }
    }

    fn matches(&self, m: &Module) -> bool {
        match self {
            Pattern::Group(g) => m.group.name() == *g,
            Pattern::Last(l) => m.last() == l,
            Pattern::Whole(r) => r.is_match(&m.name),
        }
    }
}
