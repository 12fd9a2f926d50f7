//! Reports of finished, killed and resumed runs, and of hostile metrics.

use super::comparison::MAX_RUNS;
use super::error::Error;
use super::metrics::Metrics;
use super::plot::{ExpertCounts, Series, evenly, grouped, short};
use super::render::page;
use super::words::{duration, moment};
use super::*;
use anyhow::{Context as _, Result, ensure};
use ft_base::error::{ExitCode, Failure};
use serde_json::{Value, json};
use std::path::Path;

/// A run folder with the given metrics lines.
fn folder(lines: &[Value]) -> Result<tempfile::TempDir> {
    let dir = tempfile::tempdir()?;
    let text: String = lines.iter().map(|l| format!("{l}\n")).collect();
    std::fs::write(dir.path().join("metrics.jsonl"), text)?;
    std::fs::write(dir.path().join("recipe.toml"), "[model]\nsource = \"small\"\n")?;
    Ok(dir)
}

fn start(steps: u64) -> Value {
    json!({
        "event": "start", "name": "pirate", "time": 1_700_000_000, "command": ["ft", "run", "pirate.toml"],
        "versions": {"ft": "0.1.0"}, "hashes": {"data": "abc123"}, "device": "cpu", "steps": steps,
        "plan": {
            "recompute_layers": 1, "recompute_of": 3, "reason": "it fits", "peak_device_bytes": 4000,
            "device": {"weights_mlp": 1000, "adapters": 500, "gradients": 500, "activations": 2000},
            "where": "backward of layer 2", "budget": 8192, "host_bytes_before_loading": 4096,
            "host": {"process": 9000},
        },
    })
}

fn step(step: u64, loss: f64) -> Value {
    json!({
        "event": "step", "step": step, "loss": loss, "grad_norm": 0.5, "lr": 1e-3, "tokens": 100,
        "target_tokens": 60, "seconds": 2.0, "tokens_per_second": 50.0, "peak_device_bytes": 4100,
        "peak_host_bytes": 8192,
    })
}

fn eval(step: u64, loss: f64) -> Value {
    json!({"event": "eval", "step": step, "loss": loss, "target_tokens": 10})
}

fn sample(step: u64, prompt: &str, reply: &str) -> Value {
    json!({"event": "sample", "step": step, "prompt": prompt, "reply": reply})
}

fn end(steps: u64) -> Value {
    json!({
        "event": "end", "step": steps, "peak_device_bytes": 4200, "planned_peak_bytes": 4000,
        "time": 1_700_000_060,
        "memory": {
            "planned": {"frozen_weights": 1500, "gradients": 500, "moments": 0, "activations_and_temporaries": 2000},
            "measured": {"frozen_weights": 1600, "gradients": 500, "moments": 0, "activations_and_temporaries": 2100},
            "planned_phases": {"forward": 3000}, "measured_phases": {"forward": 3300, "saving": 10},
        },
    })
}

/// The page of a folder, checked for closed tags and no external requests.
#[track_caller]
fn whole(dir: &tempfile::TempDir) -> Result<String> {
    let html = page(dir.path())?;
    balanced(&html)?;
    for wanted in
        ["<script", "<link", "<img", "src=", "href=", "url(", "@import", "http:", "https:", "NaN", "inf "]
    {
        ensure!(!html.contains(wanted), "{wanted:?} is in the page");
    }
    Ok(html)
}

/// Checks that tags are properly nested and attributes quoted.
fn balanced(html: &str) -> Result<()> {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = html;
    while let Some(at) = rest.find('<') {
        rest = &rest[at..];
        let tag = &rest[1..rest.find('>').context("a tag without an end")?];
        rest = &rest[tag.len() + 2..];
        ensure!(tag.matches('"').count().is_multiple_of(2) && !tag.contains('<'), "<{tag}>");
        let name = tag.split([' ', '/']).find(|n| !n.is_empty()).context("a tag without a name")?;
        if tag.starts_with('/') {
            let last = open.pop();
            ensure!(last == Some(name), "</{name}> closes {last:?}");
        } else if !(tag.ends_with('/') || ["!DOCTYPE", "meta", "br"].contains(&name)) {
            open.push(name);
        }
        if tag == "style" {
            rest = &rest[rest.find("</style").context("style has no end")?..];
        }
    }
    ensure!(open.is_empty(), "not closed: {open:?}");
    Ok(())
}

#[track_caller]
fn says(html: &str, what: &[&str]) {
    for w in what {
        assert!(html.contains(w), "{w:?} is not in the page");
    }
}

#[test]
fn a_finished_run() -> Result<()> {
    let mut lines = vec![start(4), eval(0, 5.0), sample(0, "Sky?", "Blue.")];
    lines.extend((1..=4).map(|s| step(s, 5.0 - s as f64)));
    lines.extend([eval(2, 2.0), eval(4, 2.5), sample(4, "Sky?", "Arr, blue."), end(4)]);
    let dir = folder(&lines)?;
    std::fs::create_dir(dir.path().join("adapter"))?;
    std::fs::write(dir.path().join("adapter/a.bin"), [0; 2048])?;
    let html = whole(&dir)?;
    says(
        &html,
        &[
            "<h1>pirate</h1>",
            "finished: 4 steps",
            "class=\"value\">2.500<",
            "first 5.000 at step 0, best 2.000 at step 2",
        ],
    );
    // 400 tokens in 8 seconds
    says(
        &html,
        &[
            "class=\"value\">400<",
            "240 of them supervised",
            "class=\"value\">8.0 s<",
            "class=\"value\">50.00<",
        ],
    );
    for id in ["loss", "evaluation", "norm", "lr", "speed"] {
        says(&html, &[&format!("<section class=\"chart\" id=\"{id}\">"), &format!("id=\"{id}-d\"")]);
    }
    says(
        &html,
        &[
            "Training loss: from 4.000 at step 1 to 1.000 at step 4; lowest 1.000 at step 4, highest 4.000 at step 1.",
        ],
    );
    // planned and measured: weights 1500 and 1600, activations 2000 and 2100, forward 3000 and 3300
    says(
        &html,
        &[
            "Planned 3.91 KiB, measured 4.10 KiB",
            "frozen weights",
            "activations and temporaries",
            "Peak of each phase",
            "+6.7%",
            "+5.0%",
            "+10.0%",
            "saved activations",
        ],
    );
    says(&html, &["backward of layer 2", "1 of 3 layers (it fits)", "8.00 KiB"]);
    says(
        &html,
        &["Arr, blue.", "abc123", "ft run pirate.toml", "2023-11-14 22:13 UTC", "2023-11-14 22:14 UTC"],
    );
    says(&html, &["source = &quot;small&quot;", "adapter&#x2f;", "2.00 KiB"]);
    assert!(!html.contains("id=\"experts\"") && !html.contains("Resumed"), "{html}");
    // deterministic, and written to the requested path
    assert_eq!(html, page(dir.path())?);
    assert_eq!(write(dir.path(), None)?, dir.path().join("report.html"));
    let out = dir.path().join("other.html");
    assert_eq!(write(dir.path(), Some(&out))?, out);
    assert_eq!(std::fs::read_to_string(&out)?, html);
    Ok(())
}

#[test]
fn no_text_becomes_markup() -> Result<()> {
    let evil =
        "</td></table><script>alert(1)</script><img src=x onerror=\"alert(2)\">&amp;'{{ 7 * 7 }}{% raw %}";
    let mut first = start(2);
    for key in ["name", "device", "dtype"] {
        first[key] = json!(evil);
    }
    first["plan"]["where"] = json!(evil);
    first["plan"]["device"][evil] = json!(7);
    first["hashes"][evil] = json!([evil, {"a": evil}]);
    let stopped = json!({"event": "stopped", "step": 1, "code": 1, "why": evil});
    let dir = folder(&[first, step(1, 1.0), sample(1, evil, evil), stopped])?;
    std::fs::write(dir.path().join("recipe.toml"), evil)?;
    let html = page(dir.path())?;
    balanced(&html)?;
    for bad in ["<script", "<img", "onerror=\"", "49"] {
        // 49: the result of an evaluated template expression
        assert!(!html.split("</style>").skip(1).any(|t| t.contains(bad)), "{bad:?}");
    }
    // name (title and heading), device, dtype, place, component, hash name and twice the hash value,
    // prompt, reply, why, recipe
    assert!(html.matches("&lt;script&gt;alert(1)&lt;&#x2f;script&gt;").count() >= 12);
    Ok(())
}

#[test]
fn a_killed_run_leaves_half_a_line() -> Result<()> {
    let dir = folder(&[start(10), step(1, 3.0), step(2, 2.0)])?;
    let path = dir.path().join("metrics.jsonl");
    let mut text = std::fs::read(&path)?;
    text.extend_from_slice(b"not json\n{\"event\": \"st\xff\"}\n[1]\n\n{\"event\":\"step\",\"step\":3,\"lo");
    std::fs::write(&path, text)?;
    let m = Metrics::read(&path)?;
    assert_eq!((m.last_step(), m.cut_short, m.damaged.as_slice()), (2, true, [4, 5, 6].as_slice()));
    let html = whole(&dir)?;
    says(
        &html,
        &[
            "not finished: step 2 of 10 is the last",
            "cut short",
            "3 lines of metrics.jsonl cannot be read",
            "4, 5, 6",
        ],
    );
    Ok(())
}

#[test]
fn why_a_run_stopped() -> Result<()> {
    for (code, says_so) in
        [(130, "interrupted by a signal"), (6, "not finite"), (8, "out of memory"), (1, "an error")]
    {
        let why = "step 3: the loss is not right\n  rows: 1, 2\n  hint: look";
        let event = json!({"event": "stopped", "step": 2, "code": code, "why": why});
        let html = whole(&folder(&[start(9), step(1, 1.0), step(2, 1.0), event])?)?;
        says(&html, &[says_so, "after step 2 of 9", "step 3: the loss is not right", "rows: 1, 2"]);
        assert!(!html.contains("hint:"));
    }
    Ok(())
}

/// Answer scores are shown next to the loss if present; scores of repeated steps are dropped.
#[test]
fn scores_of_answers_are_shown() -> Result<()> {
    let scored = |step: u64, rouge: f64| {
        let mut event = eval(step, 1.5);
        (event["exact_match"], event["rouge_l"]) = (0.25.into(), rouge.into());
        event
    };
    let resume = json!({"event": "resume", "step": 1, "steps": 2});
    let dir = folder(&[start(2), eval(0, 3.0), step(1, 2.0), step(2, 1.0), scored(2, 0.9), resume])?;
    assert!(Metrics::read(&dir.path().join("metrics.jsonl"))?.scores.is_empty());
    assert!(!whole(&dir)?.contains("ROUGE-L"));
    let dir = folder(&[start(2), eval(0, 3.0), step(1, 2.0), step(2, 1.0), scored(2, 0.4375), end(2)])?;
    let html = whole(&dir)?;
    says(
        &html,
        &["<th scope=\"col\">exact match</th><th scope=\"col\">ROUGE-L</th></tr>", "<td>0.4375</td></tr>"],
    );
    assert!(!html.contains("regex match"));
    Ok(())
}

/// A repeated step overrides the earlier one, and a resume discards later steps.
#[test]
fn a_resumed_run_counts_each_step_once() -> Result<()> {
    // the first start had fewer steps
    let resume = |step: u64| json!({"event": "resume", "step": step, "steps": 6});
    let mut lines = vec![start(5)];
    lines.extend((1..=5).map(|s| step(s, 10.0 + s as f64)));
    lines.extend([eval(5, 9.0), sample(5, "a", "old"), end(5), resume(3)]);
    lines.extend([step(4, 4.0), step(4, 4.5), eval(4, 1.5)]);
    let dir = folder(&lines)?;
    let m = Metrics::read(&dir.path().join("metrics.jsonl"))?;
    let losses: Vec<(u64, f64)> = m.steps.iter().map(|(s, x)| (*s, x.loss)).collect();
    assert_eq!(losses, [(1, 11.0), (2, 12.0), (3, 13.0), (4, 4.5)]);
    assert_eq!(m.evals.into_iter().collect::<Vec<_>>(), [(4, 1.5)]);
    assert!(m.samples.is_empty() && m.end.is_none());
    let html = whole(&dir)?;
    says(&html, &["Resumed 1 time, from step 3.", "resumed from step 3", "not finished: step 4 of 6"]);
    // a fresh start discards the previous run
    lines.extend([start(2), step(1, 1.0)]);
    let m = Metrics::read(&folder(&lines)?.path().join("metrics.jsonl"))?;
    assert_eq!((m.steps.len(), m.resumed.len()), (1, 0));
    Ok(())
}

#[test]
fn what_is_not_a_number_is_a_gap() -> Result<()> {
    let mut broken = step(2, 0.0);
    broken["loss"] = Value::Null;
    let lies = json!({"event": "step", "step": 3, "loss": "low", "lr": 1e308, "tokens": -5, "seconds": [1]});
    let huge = json!({"event": "step", "step": u64::MAX, "loss": 1.0});
    let experts =
        json!({"event": "experts", "step": 3, "layers": [{"layer": "x", "tokens": ["a", -1]}, {}, 7]});
    let lines = [start(4), step(1, 3.0), broken, lies, step(4, 2.0), experts, json!({"event": "end"})];
    let html = whole(&folder(&lines)?)?;
    says(&html, &["2 steps have no finite number (crosses at the top): 2, 3.", "class=\"gap\"", "none"]);
    whole(&folder(&[start(4), step(1, 3.0), huge])?)?;
    whole(&folder(&[start(0)])?)?;
    whole(&folder(&[json!({"event": "resume", "step": u64::MAX}), json!({"event": "other"})])?)?;
    Ok(())
}

#[test]
fn a_long_run_stays_a_small_page() -> Result<()> {
    const STEPS: u64 = 100_000;
    let loss = |s: u64| match s {
        77_777 => 99.0,
        33_333 => -9.0,
        _ => 2.0 + ((s * 7919) % 1000) as f64 / 1000.0,
    };
    let mut lines = vec![start(STEPS)];
    for s in 1..=STEPS {
        lines.push(step(s, loss(s)));
        if s % 500 == 0 {
            lines.extend([eval(s, loss(s)), sample(s, "Sky?", &"blue ".repeat(2000))]);
        }
    }
    let dir = folder(&lines)?;
    let html = whole(&dir)?;
    assert!(html.len() < 1_000_000, "{} bytes", html.len());
    says(
        &html,
        &[
            "lowest -9.000 at step 33333, highest 99.00 at step 77777",
            "100\u{2009}000",
            "(cut: ",
            "evenly spaced",
        ],
    );
    Ok(())
}

#[test]
fn thinning_keeps_extremes_gaps_and_ends() {
    let mut s = Series((0..50_000).map(|i| (i, (i as f64 * 0.37).sin())).collect());
    for (at, y) in [(12_345, 50.0), (23_456, -50.0), (34_567, f64::NAN)] {
        s.0[at].1 = y;
    }
    let thin = s.thin(900);
    assert!(thin.0.len() <= 902, "{}", thin.0.len());
    assert_eq!((thin.highest(), thin.lowest()), (Some((12_345, 50.0)), Some((23_456, -50.0))));
    assert_eq!(thin.gaps(), [34_567]);
    assert_eq!((thin.0[0].0, thin.0.last().map(|p| p.0)), (0, Some(49_999)));
    assert!(thin.0.windows(2).all(|w| w[0].0 < w[1].0));
    assert_eq!(s.thin(50_000).0.len(), 50_000);
    // a constant keeps one point per range
    assert!(Series((0..10_000).map(|i| (i, 1.0)).collect()).thin(300).0.len() <= 202);
}

#[test]
fn series_in_numbers_and_words() {
    let s = Series(vec![(1, 4.0), (2, f64::NAN), (3, 1.0), (4, 2.0)]);
    assert_eq!((s.median(), Series::default().median()), (Some(2.0), None));
    let constant = Series((0..9).map(|i| (i, 3.0)).collect());
    assert!(constant.smooth(5.0).0.iter().all(|p| (p.1 - 3.0).abs() < 1e-12));
    // the first point is unchanged; a gap keeps the mean
    let smooth = s.smooth(1.0);
    let e = (-1f64).exp();
    assert_eq!((smooth.0[0].1, smooth.0[1].1), (4.0, 4.0));
    assert!((smooth.0[2].1 - (4.0 * e + 1.0) / (e + 1.0)).abs() < 1e-12);
    assert_eq!((evenly(5, 10), evenly(10, 3), evenly(0, 4)), (vec![0, 1, 2, 3, 4], vec![0, 4, 9], vec![]));
    assert_eq!(
        [1234567.0, 123.456, 0.0, 1.5e-5, f64::NAN].map(short),
        ["1.235e6", "123.5", "0", "1.500e-5", "none"]
    );
    assert_eq!([0, 999, 1000, 1234567].map(grouped), ["0", "999", "1\u{2009}000", "1\u{2009}234\u{2009}567"]);
    assert_eq!(
        [59.0, 600.0, 36_000.0, 864_000.0].map(duration),
        ["59.0 s", "10.0 min", "10.0 h", "10.0 days"]
    );
    // date -u -d @N
    for (n, want) in [
        (0, "1970-01-01 00:00 UTC"),
        (951_782_400, "2000-02-29 00:00 UTC"),
        (1_709_251_199, "2024-02-29 23:59 UTC"),
        (1_709_251_200, "2024-03-01 00:00 UTC"),
    ] {
        assert_eq!(moment(n), want);
    }
}

#[test]
fn experts_are_told_by_layer() -> Result<()> {
    let layers = |tokens: [[u64; 4]; 2]| -> Value {
        tokens.iter().enumerate().map(|(l, t)| json!({"layer": 2 * l + 1, "tokens": t})).collect()
    };
    let event = |step: u64, tokens, entropy: f64, dead: u64| json!({"event": "experts", "step": step, "steps": 10, "entropy": entropy, "peak": 2.0, "dead": dead, "layers": layers(tokens)});
    let mut lines = vec![start(30)];
    lines.extend((1..=30).map(|s| {
        let mut s = step(s, 1.0);
        s["aux_loss"] = json!(4.125);
        s
    }));
    lines.extend([
        event(10, [[5, 5, 5, 5], [10, 10, 0, 0]], 0.75, 2),
        event(20, [[7, 7, 7, 7], [1, 1, 1, 1]], 1.0, 0),
        event(30, [[20, 0, 0, 0], [4, 4, 8, 4]], 0.5, 3),
    ]);
    let html = whole(&folder(&lines)?)?;
    says(
        &html,
        &[
            "Load of the experts, steps 1 to 10",
            "Load of the experts, steps 21 to 30",
            "id=\"entropy\"",
            "id=\"aux\"",
            "Load-balancing loss",
        ],
    );
    assert!(!html.contains("steps 11 to 20"));
    says(
        &html,
        &[
            "The busiest is expert 0 of layer 1, with 4.000 times the even load; 3 experts got none.",
            "3: 1, 2, 3",
            "class=\"dead\"",
        ],
    );
    // shades by load: 4 and more, zero, 1.6 and 0.8 times the even load
    let last = html.split("id=\"heat2\"").nth(1).context("a second map")?;
    for shade in [
        "s6\" d=\"M70.0 8h168.5v22h-168.5z\"",
        "s0\" d=\"M238.5 8h505.5v22h-505.5z\"",
        "s4\" d=\"M407.0 30h168.5",
    ] {
        assert!(last.contains(shade), "{shade} is not in the map");
    }
    // many experts and layers still give a small page, with shared columns
    let many: Value = (0..100)
        .map(|l| json!({"layer": l, "tokens": (0..512).map(|e| (e * 31 + l) % 97).collect::<Vec<u64>>()}))
        .collect();
    let html = whole(&folder(&[
        start(1),
        step(1, 1.0),
        json!({"event": "experts", "step": 1, "steps": 1, "layers": many}),
    ])?)?;
    says(&html, &["512 experts in 128 columns"]);
    assert!(html.len() < 1_000_000, "{} bytes", html.len());
    let even = ExpertCounts { layer: 0, tokens: vec![3; 8] };
    assert_eq!((even.entropy(), even.peak()), (1.0, 1.0));
    Ok(())
}

#[test]
fn what_is_no_run_is_refused_by_name() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let fail = |dir: &Path| page(dir).err().context("a page of nothing");
    let e = fail(&dir.path().join("gone"))?;
    assert!(e.to_string().contains("gone/metrics.jsonl") && e.to_string().contains("hint:"), "{e}");
    assert_eq!(e.exit_code(), ExitCode::Storage);
    for text in ["", "\n\n", "nothing\n", "{\"a\": 1}\n", "{\"event\""] {
        std::fs::write(dir.path().join("metrics.jsonl"), text)?;
        let e = fail(dir.path())?;
        assert!(matches!(e, Error::Nothing { .. }) && e.to_string().contains("metrics.jsonl"), "{e}");
        assert_eq!(e.exit_code(), ExitCode::Storage);
    }
    // a missing recipe is reported on the page
    let dir = folder(&[start(1), step(1, 1.0)])?;
    std::fs::remove_file(dir.path().join("recipe.toml"))?;
    says(&whole(&dir)?, &["recipe.toml is not in the run folder"]);
    let e = write(dir.path(), Some(&dir.path().join("metrics.jsonl/page.html"))).err().context("written")?;
    assert_eq!(e.exit_code(), ExitCode::Storage);
    Ok(())
}

/// Several runs: a summary row per run, and recipe differences.
#[test]
fn several_runs_are_compared() -> Result<()> {
    let of = |name: &str, rank: u32, loss: f64| -> Result<tempfile::TempDir> {
        let mut first = start(3);
        first["name"] = name.into();
        let steps = (1..=3).map(|s| step(s, loss / s as f64));
        let dir = folder(&[vec![first], steps.collect(), vec![eval(3, loss / 4.0), end(3)]].concat())?;
        let recipe = format!(
            "name = {name:?}\n[model]\nsource = \"small\"\n[[train]]\nmodules = [\"mlp\"]\nrank = {rank}\n[run]\noutput = {name:?}\n"
        );
        std::fs::write(dir.path().join("recipe.toml"), recipe)?;
        Ok(dir)
    };
    let dirs = [of("low", 4, 2.0)?, of("high <b>", 64, 4.0)?];
    let runs = dirs.each_ref().map(|d| d.path().to_path_buf());
    let out = dirs[0].path().join("c.html");
    write_comparison(&runs, &out)?;
    let html = std::fs::read_to_string(&out)?;
    balanced(&html)?;
    for wanted in [
        "train.0.rank</th><td>4</td><td>64",
        "class=\"line run1\"",
        "high &lt;b&gt;",
        "0.5000 after step 3",
        "3 more are alike",
    ] {
        ensure!(html.contains(wanted), "no {wanted:?} in {html}");
    }
    ensure!(!html.contains("run.output") && !html.contains("<b>"), "what is only a name");
    // runs of equal name are labeled by folder
    write_comparison(&[runs[0].clone(), runs[0].clone()], &out)?;
    let html = std::fs::read_to_string(&out)?;
    let folder = runs[0].display().to_string().replace('/', "&#x2f;");
    ensure!(html.contains(&folder) && html.contains("In the recipes: nothing"), "{html}");
    let many = vec![runs[0].clone(); MAX_RUNS + 1];
    ensure!(write_comparison(&many, &out).is_err_and(|e| e.exit_code() == ExitCode::Usage));
    Ok(())
}
