//! Contents of a report page: texts and coordinates for the template.

use super::files::Files;
use super::memory::Memory;
use super::metrics::{ExpertLoad, Metrics, SCORES, Sample, Step, text};
use super::plot::{
    Chart, Curve, HeatMap, LineStyle, Range, Series, Table, cut, duration, grouped, moment, plural, short,
    thin_evenly,
};
use super::state::State;
use minijinja::context;
use minijinja::value::Serde;
use serde::Serialize;
use serde_json::Value;
use std::collections::HashMap;

/// Most samples per prompt.
const SAMPLES: usize = 24;
/// Most prompts.
const PROMPTS: usize = 16;
/// Most characters of a text from a file.
const MAX_TEXT: usize = 4000;
/// Most characters of the recipe.
const RECIPE: usize = 200_000;

/// A key figure at the top of the page.
#[derive(Clone, Debug, Serialize)]
struct Headline {
    name: &'static str,
    value: String,
    /// Details below the figure.
    more: String,
}

/// A name and a value.
#[derive(Clone, Debug, Serialize)]
pub struct Fact {
    /// Dotted path.
    pub name: String,
    pub value: String,
}

/// Answers to one prompt over time.
#[derive(Clone, Debug, Serialize)]
struct Samples {
    prompt: String,
    /// Empty if none is known.
    reference: String,
    replies: Vec<Reply>,
    note: String,
}

/// A reply after a step.
#[derive(Clone, Debug, Serialize)]
struct Reply {
    step: u64,
    text: String,
    score: String,
}

fn headlines(m: &Metrics) -> Vec<Headline> {
    let mut out = Vec::new();
    let mut add = |name, value, more| out.push(Headline { name, value, more });
    let ends = |s: &Series| Some((s.finite().next()?, s.finite().next_back()?));
    let evals = m.eval_losses();
    if let (Some((first, last)), Some(best)) = (ends(&evals), evals.lowest()) {
        let (first_loss, best_loss) = (short(first.1), short(best.1));
        let mut more = format!("first {first_loss} at step {}, best {best_loss} at step {}", first.0, best.0);
        let perplexity = m.evals[&last.0].perplexity;
        if perplexity.is_finite() {
            more += &format!("; perplexity {}", short(perplexity));
        }
        add("evaluation loss", short(last.1), more);
    }
    if let Some((first, last)) = ends(&m.smoothed(|s| s.loss)) {
        let mut more = format!("first {} at step {}", short(first.1), first.0);
        if m.is_smoothed() {
            more += &format!("; smoothed over {}", plural(m.window() as u64, "step"));
        }
        add("training loss", short(last.1), more);
    }
    if let Some(rate) = m.series(|s| s.rate).median() {
        add("speed", short(rate), "tokens a second, the median of all steps".into());
    }
    let (tokens, targets, seconds) = (m.sum(|s| s.tokens), m.sum(|s| s.targets), m.sum(|s| s.seconds));
    if tokens > 0.0 {
        let more = format!("{} of them supervised", grouped(targets as u64));
        add("tokens", grouped(tokens as u64), more);
    }
    if seconds > 0.0 {
        let more = format!("in {} of training, evaluation not counted", plural(m.steps.len() as u64, "step"));
        add("time", duration(seconds), more);
    }
    out
}

/// Range of all recorded steps.
fn range(m: &Metrics) -> Range<'_> {
    Range { steps: m.span().unwrap_or((0, 1)), resumed: &m.resumed }
}

const DISTILLED: [&str; 2] = ["divergence from the teacher", "cross-entropy of the labels"];

fn charts(m: &Metrics) -> Vec<Chart> {
    let range = range(m);
    let chart = |id, title, label, points: Series, notes: &[&str]| {
        Chart::new(id, title, &[Curve { label, style: LineStyle::Main, points }], &range, notes)
    };
    let two = |id, title, labels: [&'static str; 2], of: [fn(&Step) -> f64; 2]| {
        let curve = |k: usize| Curve { label: labels[k], style: LineStyle::Run(k), points: m.series(of[k]) };
        Chart::new(id, title, &[curve(0), curve(1)], &range, &["Means over the step."])
    };
    let training = |label, style, points| Curve { label, style, points };
    let mut loss = vec![training("training loss", LineStyle::Raw, m.series(|s| s.loss))];
    let unit = if m.is_of_documents() {
        "Mean over pairs or documents"
    } else {
        "Mean cross-entropy of a supervised token"
    };
    let mut about = vec![format!("{unit}, in nats.")];
    if m.is_smoothed() {
        loss.push(training("training loss, smoothed", LineStyle::Main, m.smoothed(|s| s.loss)));
        about.push(format!("Smoothed: an exponential mean over some {} steps.", m.window()));
    } else {
        loss[0].style = LineStyle::Main;
    }
    let curve = Curve { label: "evaluation loss", style: LineStyle::Dots, points: m.eval_losses() };
    let evaluated = curve.points.finite().count();
    let evaluation = Chart::new("evaluation", "Evaluation loss", std::slice::from_ref(&curve), &range, &[]);
    if evaluated > 0 {
        loss.push(curve);
    }
    let aux = "Before its coefficient; not in the loss above.";
    let load_balancing = ("Load-balancing loss of the routers", "load-balancing loss");
    let charts = [
        Chart::new("loss", "Loss", &loss, &range, &about.iter().map(String::as_str).collect::<Vec<_>>()),
        evaluation.filter(|_| evaluated > 1),
        scores(m, &range),
        chart("aux", load_balancing.0, load_balancing.1, m.series(|s| s.aux_loss), &[aux]),
        chart("z", "z-loss of the routers", "z-loss", m.series(|s| s.z_loss), &[aux]),
        accuracy(m, &range),
        chart("margin", "Margin of rewards", "margin", m.series(|s| s.margin), &["Chosen less rejected."]),
        two("rewards", "Rewards", ["chosen", "rejected"], [|s| s.rewards[0], |s| s.rewards[1]]),
        two("logps", "Log-probabilities", ["chosen", "rejected"], [|s| s.logps[0], |s| s.logps[1]]),
        two("distilled", "Distillation", DISTILLED, [|s| s.distilled[0], |s| s.distilled[1]]),
        chart("norm", "Gradient norm", "gradient norm", m.series(|s| s.grad_norm), &["Before clipping."]),
        chart("lr", "Learning rate", "learning rate", m.series(|s| s.lr), &[]),
        chart("speed", "Tokens a second", "tokens a second", m.series(|s| s.rate), &[]),
    ];
    charts.into_iter().flatten().collect()
}

/// Number of scores of generated answers among [`SCORES`].
const OF_ANSWERS: usize = 3;

/// Curves of some of the [`SCORES`] with at least `least` finite values.
fn score_curves(m: &Metrics, of: std::ops::Range<usize>, least: usize) -> Vec<Curve<'static>> {
    let curve = |k: usize| {
        let points = m.evals.iter().map(|(step, e)| (*step, e.scores[k])).filter(|(_, y)| y.is_finite());
        let points = Series(points.collect());
        Curve { label: SCORES[k].0, style: LineStyle::RunDots(k), points }
    };
    of.map(curve).filter(|c| c.points.0.len() >= least).collect()
}

/// Curves of the accuracy, in training and in evaluation.
fn accuracy(m: &Metrics, range: &Range<'_>) -> Option<Chart> {
    let mut curves =
        vec![Curve { label: "training", style: LineStyle::Main, points: m.series(|s| s.accuracy) }];
    curves.extend(score_curves(m, OF_ANSWERS..SCORES.len(), 1));
    let note = "Share of pairs with the higher reward for chosen, or of documents with the right class; F1 is the mean \
                over the classes. The dots are evaluations.";
    Chart::new("accuracy", "Accuracy", &curves, range, &[note])
}

/// Curves of the scores of generated answers; `None` before the second evaluation.
fn scores(m: &Metrics, range: &Range<'_>) -> Option<Chart> {
    let curves = score_curves(m, 0..OF_ANSWERS, 2);
    let note = "Means over the answers to generate.samples; 1 is the reference each time.";
    Chart::new("scores", "Scores of the answers", &curves, range, &[note])
}

fn expert_charts(m: &Metrics) -> Vec<Chart> {
    let range = range(m);
    let chart = |id, title, label, f: fn(&ExpertLoad) -> f64, note| {
        let points = Series(m.expert_load.iter().map(|(s, x)| (*s, f(x))).collect());
        Chart::new(id, title, &[Curve { label, style: LineStyle::Main, points }], &range, &[note])
    };
    let mean = "Mean of the layers; 1 is an even load, 0 one expert for all tokens.";
    let all = "Of all layers together, in the steps since the point before.";
    let peak = "Busiest expert, times the even load";
    let charts = [
        chart("entropy", "Entropy of the load", "entropy", |x| x.entropy, mean),
        chart("dead", "Experts without a token", "experts", |x| x.dead, all),
        chart("peak", peak, "times the even load", |x| x.peak, "Of any layer."),
    ];
    charts.into_iter().flatten().collect()
}

fn eval_table(m: &Metrics) -> Option<Table> {
    if m.evals.is_empty() {
        return None;
    }
    let recorded = |k: &usize| m.evals.values().any(|e| e.scores[*k].is_finite());
    let recorded: Vec<usize> = (0..SCORES.len()).filter(recorded).collect();
    let by_token = m.evals.values().any(|e| e.perplexity.is_finite()).then_some("perplexity");
    let head =
        ["after step", "loss"].into_iter().chain(by_token).chain(recorded.iter().map(|k| SCORES[*k].0));
    Some(Table::thinned(head, m.evals.iter().collect(), "evaluations", |(step, eval)| {
        let scores = recorded.iter().map(|k| short(eval.scores[*k]));
        let perplexity = by_token.map(|_| short(eval.perplexity));
        [step.to_string(), short(eval.loss)].into_iter().chain(perplexity).chain(scores).collect()
    }))
}

/// Groups replies by prompt, in the order of the prompts.
fn by_prompt(all: &[Sample]) -> Vec<Samples> {
    let mut prompts: Vec<(&Sample, Vec<&Sample>)> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    for sample in all {
        let place = *places.entry(&sample.prompt).or_insert(prompts.len());
        if place == prompts.len() {
            prompts.push((sample, Vec::new()));
        }
        prompts[place].1.push(sample);
    }
    let samples = |(first, replies): (&Sample, Vec<&Sample>)| {
        let (replies, note) = thin_evenly(replies, SAMPLES, "replies");
        let reply =
            |s: &Sample| Reply { step: s.step, text: cut(&s.reply, MAX_TEXT), score: short(s.rouge_l) };
        Samples {
            prompt: cut(&first.prompt, MAX_TEXT),
            reference: cut(&first.reference, MAX_TEXT),
            replies: replies.into_iter().map(reply).collect(),
            note,
        }
    };
    prompts.into_iter().take(PROMPTS).map(samples).collect()
}

/// Flattens an object to dotted paths; list entries of objects are named by index.
pub fn flatten(prefix: &str, v: &Value, out: &mut Vec<Fact>) {
    let name = |k: &str| if prefix.is_empty() { k.to_string() } else { format!("{prefix}.{k}") };
    match v {
        Value::Object(map) => map.iter().for_each(|(k, v)| flatten(&name(k), v, out)),
        Value::Null => {}
        Value::Array(list) if list.iter().any(Value::is_object) => {
            list.iter().enumerate().for_each(|(i, v)| flatten(&name(&i.to_string()), v, out));
        }
        Value::Array(list) => {
            let words: Vec<String> = list.iter().map(plain).collect();
            out.push(Fact { name: prefix.into(), value: cut(&words.join(" "), MAX_TEXT) });
        }
        other => out.push(Fact { name: prefix.into(), value: cut(&plain(other), MAX_TEXT) }),
    }
}

fn plain(v: &Value) -> String {
    v.as_str().map_or_else(|| v.to_string(), String::from)
}

/// Facts of the "start" event, except the plan.
fn facts(m: &Metrics) -> Vec<Fact> {
    let mut out = Vec::new();
    let Some(start) = m.start.as_object() else { return out };
    for (key, v) in start {
        match key.as_str() {
            "event" | "plan" | "step" | "given" => {}
            "time" => {
                let value = v.as_u64().map(moment).unwrap_or_default();
                out.push(Fact { name: "started".into(), value });
            }
            _ => flatten(key, v, &mut out),
        }
    }
    let ended = m.last_event()["time"].as_u64();
    out.extend(ended.map(|t| Fact { name: "ended".into(), value: moment(t) }));
    out.truncate(200);
    out
}

/// Values of the template, for the page of a run; `heat_maps` are expert load maps.
pub fn page_view(name: &str, m: &Metrics, heat_maps: Vec<HeatMap>, files: Files) -> minijinja::Value {
    let own = text(&m.start, "name");
    context! {
        title => cut(if own.is_empty() { name } else { own }, 200),
        state => Serde(State::new(m, files.result.as_deref())),
        headlines => Serde(headlines(m)),
        charts => Serde(charts(m)),
        evals => Serde(eval_table(m)),
        expert_charts => Serde(expert_charts(m)),
        heat_maps => Serde(heat_maps),
        memory => Serde(Memory::new(m)),
        samples => Serde(by_prompt(&m.samples)),
        answers => Serde(by_prompt(&m.answers)),
        recipe => files.recipe.map(|r| cut(&r, RECIPE)),
        facts => Serde(facts(m)),
        files => Serde(files.rows),
    }
}
