//! Contents of a report page: texts and coordinates for the template.

use super::chart::{Chart, Curve, Frame, Look, Table};
use super::files::Files;
use super::heat::Heat;
use super::memory::Memory;
use super::read::{Metrics, SCORES, Sample, Spread, Step, text};
use super::series::{Series, duration, evenly, grouped, moment, short};
use serde::Serialize;
use serde_json::Value;

/// Most samples per prompt.
const SAMPLES: usize = 24;
/// Most prompts.
const PROMPTS: usize = 12;
/// Most characters of a text from a file.
const LONGEST: usize = 4000;
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
    replies: Vec<(u64, String)>,
    note: String,
}

/// Status of a run.
#[derive(Clone, Debug, Serialize)]
pub struct State {
    /// `finished`, `stopped` or `open`.
    kind: &'static str,
    /// Symbol before the headline.
    pub sign: &'static str,
    /// Headline.
    pub words: String,
    more: Vec<String>,
}

/// The page's contents.
#[derive(Clone, Debug, Serialize)]
pub struct View {
    title: String,
    state: State,
    headlines: Vec<Headline>,
    charts: Vec<Chart>,
    evals: Option<Table>,
    expert_charts: Vec<Chart>,
    heats: Vec<Heat>,
    memory: Option<Memory>,
    samples: Vec<Samples>,
    recipe: Option<String>,
    facts: Vec<Fact>,
    files: Vec<Vec<String>>,
}

/// Truncates a text, with a notice.
pub fn cut(text: &str, longest: usize) -> String {
    match text.char_indices().nth(longest) {
        Some((at, _)) => format!("{} (cut: {} more bytes)", &text[..at], text.len() - at),
        None => text.to_string(),
    }
}

fn plural(n: u64, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{} {what}s", grouped(n)) }
}

/// Status of a run; `result` is the folder of the result.
pub fn state(m: &Metrics, result: Option<&str>) -> State {
    let (last, total) = (m.last_step(), m.total_steps());
    let of = if total > 0 { format!("{last} of {total}") } else { last.to_string() };
    let mut more = Vec::new();
    let (kind, sign, words) = match (&m.end, &m.stopped) {
        (Some(_), _) => ("finished", "✓", format!("finished: {}", plural(last, "step"))),
        (None, Some(s)) => {
            let why = match s.code {
                129 | 130 | 143 => "interrupted by a signal",
                6 => "stopped by the guard against numbers that are not finite",
                8 => "stopped: out of memory",
                5 => "stopped by the disk",
                _ => "stopped by an error",
            };
            let lines = s.why.lines().map(str::trim).filter(|l| !l.starts_with("hint:"));
            more.extend(lines.take(12).map(|l| cut(l, 400)));
            ("stopped", "■", format!("{why} after step {of}"))
        }
        (None, None) => ("open", "…", format!("not finished: step {of} is the last; still going, or killed")),
    };
    if let Some(result) = result {
        more.push(format!("Result: {result}"));
    }
    if !m.resumed.is_empty() {
        let steps = if m.resumed.len() == 1 { "step" } else { "steps" };
        let times = plural(m.resumed.len() as u64, "time");
        more.push(format!("Resumed {times}, from {steps} {}.", super::chart::some(&m.resumed)));
    }
    if m.cut_short {
        more.push("The last line of metrics.jsonl is cut short, and left out.".into());
    }
    if !m.damaged.is_empty() {
        let lines = plural(m.damaged.len() as u64, "line");
        more.push(format!(
            "{lines} of metrics.jsonl cannot be read, and are left out: {}.",
            super::chart::some(&m.damaged)
        ));
    }
    State { kind, sign, words, more }
}

/// A number of each step.
pub fn of_steps(m: &Metrics, f: impl Fn(&Step) -> f64) -> Series {
    Series(m.steps.iter().map(|(step, s)| (*step, f(s))).collect())
}

/// Like [`of_steps`]; `None` if no step has the number.
fn some_steps(m: &Metrics, f: impl Fn(&Step) -> f64) -> Option<Series> {
    let s = of_steps(m, f);
    let any = s.finite().next().is_some();
    any.then_some(s)
}

/// Evaluation losses.
pub fn evals(m: &Metrics) -> Series {
    Series(m.evals.iter().map(|(s, l)| (*s, *l)).collect())
}

/// Smoothing window of the loss: a fiftieth of the run, in steps.
pub fn over(m: &Metrics) -> f64 {
    (m.steps.len() as f64 / 50.0).round().clamp(1.0, 500.0)
}

fn headlines(m: &Metrics) -> Vec<Headline> {
    let mut out = Vec::new();
    let ends = |s: &Series| Some((s.finite().next()?, s.finite().next_back()?));
    let evals = evals(m);
    if let (Some((first, last)), Some(best)) = (ends(&evals), evals.lowest()) {
        let more = format!(
            "first {} at step {}, best {} at step {}; perplexity {}",
            short(first.1),
            first.0,
            short(best.1),
            best.0,
            short(last.1.exp())
        );
        out.push(Headline { name: "evaluation loss", value: short(last.1), more });
    }
    if let Some((first, last)) = ends(&of_steps(m, |s| s.loss).smooth(over(m))) {
        let over = plural(over(m) as u64, "step");
        let more = format!("first {} at step {}; smoothed over {over}", short(first.1), first.0);
        out.push(Headline { name: "training loss", value: short(last.1), more });
    }
    if let Some(rate) = of_steps(m, |s| s.rate).median() {
        let more = "tokens a second, the median of all steps".into();
        out.push(Headline { name: "speed", value: short(rate), more });
    }
    let sum = |f: fn(&Step) -> f64| m.steps.values().map(f).filter(|n| n.is_finite()).sum::<f64>();
    let (tokens, targets, seconds) = (sum(|s| s.tokens), sum(|s| s.targets), sum(|s| s.seconds));
    if tokens > 0.0 {
        let more = format!("{} of them supervised", grouped(targets as u64));
        out.push(Headline { name: "tokens", value: grouped(tokens as u64), more });
    }
    if seconds > 0.0 {
        let more = format!("in {} of training, evaluation not counted", plural(m.steps.len() as u64, "step"));
        out.push(Headline { name: "time", value: duration(seconds), more });
    }
    out
}

/// Range of all recorded steps.
fn frame(m: &Metrics) -> Frame<'_> {
    let ends = |first: Option<&u64>, last: Option<&u64>| first.copied().zip(last.copied());
    let span = [ends(m.steps.keys().next(), m.steps.keys().next_back())]
        .into_iter()
        .chain([ends(m.evals.keys().next(), m.evals.keys().next_back())])
        .flatten()
        .reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
    Frame { span: span.unwrap_or((0, 1)), resumed: &m.resumed }
}

fn charts(m: &Metrics) -> Vec<Chart> {
    let frame = frame(m);
    let chart = |id, title, label, points: Series, notes: &[&str]| {
        Chart::new(id, title, &[Curve { label, look: Look::Main, points }], &frame, notes)
    };
    let (raw, evals) = (of_steps(m, |s| s.loss), evals(m));
    let mut loss = vec![
        Curve { label: "training loss", look: Look::Raw, points: raw.clone() },
        Curve { label: "training loss, smoothed", look: Look::Main, points: raw.smooth(over(m)) },
    ];
    let curve = Curve { label: "evaluation loss", look: Look::Dots, points: evals };
    let evaluated = curve.points.finite().count();
    let evaluation = Chart::new("evaluation", "Evaluation loss", std::slice::from_ref(&curve), &frame, &[]);
    if evaluated > 0 {
        loss.push(curve);
    }
    let smoothed = format!("Smoothed: an exponential mean over some {}.", plural(over(m) as u64, "step"));
    let nats = "Loss: mean cross-entropy of a supervised token, in nats.";
    let aux = "Before its coefficient; not in the loss above.";
    [
        Chart::new("loss", "Loss", &loss, &frame, &[&smoothed, nats]),
        evaluation.filter(|_| evaluated > 1),
        some_steps(m, |s| s.aux_loss).and_then(|s| {
            chart("aux", "Load-balancing loss of the routers", "load-balancing loss", s, &[aux])
        }),
        some_steps(m, |s| s.z_loss).and_then(|s| chart("z", "z-loss of the routers", "z-loss", s, &[aux])),
        chart("norm", "Gradient norm", "gradient norm", of_steps(m, |s| s.grad_norm), &["Before clipping."]),
        chart("lr", "Learning rate", "learning rate", of_steps(m, |s| s.lr), &[]),
        chart("speed", "Tokens a second", "tokens a second", of_steps(m, |s| s.rate), &[]),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn expert_charts(m: &Metrics) -> Vec<Chart> {
    let frame = frame(m);
    let chart = |id, title, label, f: fn(&Spread) -> f64, notes: &[&str]| {
        let points = Series(m.spread.iter().map(|(s, x)| (*s, f(x))).collect());
        Chart::new(id, title, &[Curve { label, look: Look::Main, points }], &frame, notes)
    };
    let mean = "Mean of the layers; 1 is an even load, 0 one expert for all tokens.";
    let all = "Of all layers together, in the steps since the point before.";
    let busiest = "Of any layer.";
    [
        chart("entropy", "Entropy of the load", "entropy", |x| x.entropy, &[mean]),
        chart("dead", "Experts without a token", "experts", |x| x.dead, &[all]),
        chart("peak", "Busiest expert, times the even load", "times the even load", |x| x.peak, &[busiest]),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn eval_table(m: &Metrics) -> Option<Table> {
    let all: Vec<(u64, f64)> = m.evals.iter().map(|(s, l)| (*s, *l)).collect();
    let shown = evenly(all.len(), super::series::ROWS);
    let note = match shown.len() < all.len() {
        true => format!("{} of {} evaluations, evenly spaced.", shown.len(), all.len()),
        false => String::new(),
    };
    let asked = |k: &usize| m.scores.values().any(|s| s[*k].is_finite());
    let asked: Vec<usize> = (0..SCORES.len()).filter(asked).collect();
    let score = |step: u64, k: usize| m.scores.get(&step).map_or(f64::NAN, |s| s[k]);
    let row = |i: usize| {
        let (step, loss) = all[i];
        let scores = asked.iter().map(|k| short(score(step, *k)));
        [step.to_string(), short(loss), short(loss.exp())].into_iter().chain(scores).collect()
    };
    let rows: Vec<Vec<String>> = shown.into_iter().map(row).collect();
    let head = ["after step", "loss", "perplexity"].into_iter().chain(asked.iter().map(|k| SCORES[*k]));
    let head = head.map(String::from).collect();
    (!rows.is_empty()).then_some(Table { head, rows, note })
}

fn samples(m: &Metrics) -> Vec<Samples> {
    let mut prompts: Vec<&str> = m.samples.values().map(|s| s.prompt.as_str()).collect();
    prompts.sort_unstable();
    prompts.dedup();
    prompts
        .into_iter()
        .take(PROMPTS)
        .map(|prompt| {
            let all: Vec<&Sample> = m.samples.values().filter(|s| s.prompt == prompt).collect();
            let shown = evenly(all.len(), SAMPLES);
            let note = match shown.len() < all.len() {
                true => format!("{} of {} replies, evenly spaced.", shown.len(), all.len()),
                false => String::new(),
            };
            let reply = |i: usize| (all[i].step, cut(&all[i].reply, LONGEST));
            Samples { prompt: cut(prompt, LONGEST), replies: shown.into_iter().map(reply).collect(), note }
        })
        .collect()
}

/// Flattens an object to dotted paths; list entries of objects are named by index.
pub fn flat(prefix: &str, v: &Value, out: &mut Vec<Fact>) {
    let name = |k: &str| if prefix.is_empty() { k.to_string() } else { format!("{prefix}.{k}") };
    match v {
        Value::Object(map) => map.iter().for_each(|(k, v)| flat(&name(k), v, out)),
        Value::Null => {}
        Value::Array(list) if list.iter().any(Value::is_object) => {
            list.iter().enumerate().for_each(|(i, v)| flat(&name(&i.to_string()), v, out));
        }
        Value::Array(list) => {
            let words: Vec<String> = list.iter().map(plain).collect();
            out.push(Fact { name: prefix.into(), value: cut(&words.join(" "), LONGEST) });
        }
        other => out.push(Fact { name: prefix.into(), value: cut(&plain(other), LONGEST) }),
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
            "event" | "plan" | "step" => {}
            "time" => {
                let value = v.as_u64().map(moment).unwrap_or_default();
                out.push(Fact { name: "started".into(), value });
            }
            _ => flat(key, v, &mut out),
        }
    }
    let ended = m.end.as_ref().and_then(|e| e["time"].as_u64()).or(m.stopped.as_ref().and_then(|s| s.time));
    out.extend(ended.map(|t| Fact { name: "ended".into(), value: moment(t) }));
    out.truncate(200);
    out
}

impl View {
    /// Builds the page of a run; `heats` are expert load maps.
    pub fn new(name: &str, m: &Metrics, heats: Vec<Heat>, files: Files) -> Self {
        let own = text(&m.start, "name");
        Self {
            title: cut(if own.is_empty() { name } else { own }, 200),
            state: state(m, files.result.as_deref()),
            headlines: headlines(m),
            charts: charts(m),
            evals: eval_table(m),
            expert_charts: expert_charts(m),
            heats,
            memory: Memory::new(m),
            samples: samples(m),
            recipe: files.recipe.map(|r| cut(&r, RECIPE)),
            facts: facts(m),
            files: files.rows,
        }
    }
}

/// Range of steps covered by an "experts" event, in words.
pub fn steps_of(step: u64, s: &Spread) -> String {
    let from = step.saturating_sub(s.steps.saturating_sub(1)).max(1);
    if from == step { format!("step {step}") } else { format!("steps {from} to {step}") }
}
