//! Pages of runs.

use super::*;
use crate::report::comparison::MAX_RUNS;
use crate::report::metrics::Metrics;
use crate::report::write;
use ft_base::error::{ExitCode, Failure};

#[test]
fn a_finished_run_is_shown_with_curves_and_result() -> Result<()> {
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
    let run = [dir.path().to_path_buf()];
    assert_eq!(write(&run, None)?, dir.path().join("report.html"));
    let out = dir.path().join("other.html");
    assert_eq!(write(&run, Some(&out))?, out);
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
fn the_reason_of_a_stop_is_shown() -> Result<()> {
    let signals = [129, 130, 138, 143].map(|code| (code, "interrupted by a signal"));
    let errors = [(6, "not finite"), (8, "out of memory"), (1, "an error")];
    for (code, says_so) in signals.into_iter().chain(errors) {
        let why = "step 3: the loss is not right\n  rows: 1, 2\n  hint: look";
        let event = json!({"event": "stopped", "step": 2, "code": code, "why": why});
        let html = whole(&folder(&[start(9), step(1, 1.0), step(2, 1.0), event])?)?;
        says(&html, &[says_so, "after step 2 of 9", "step 3: the loss is not right", "rows: 1, 2"]);
        assert!(!html.contains("hint:"));
    }
    Ok(())
}

/// Losses of whole documents have no perplexity; in distillation, it is that of the labels.
#[test]
fn perplexities_are_those_of_the_task() -> Result<()> {
    let page = |keys: &[(&str, f64)]| {
        let mut event = eval(1, 1.0);
        keys.iter().for_each(|(key, value)| event[*key] = (*value).into());
        whole(&folder(&[start(1), step(1, 1.0), event, end(1)])?)
    };
    says(&page(&[])?, &["; perplexity 2.718", "<th scope=\"col\">perplexity</th>", "<td>2.718</td>"]);
    says(&page(&[("kd", 0.5), ("ce", 1.5)])?, &["; perplexity 4.482", "<td>4.482</td>"]);
    assert!(!page(&[("kl", 0.0)])?.contains("perplexity"));
    Ok(())
}

/// An evaluation with scores of answers.
fn scored(step: u64, exact: f64, rouge: f64) -> Value {
    let mut event = eval(step, 1.5);
    (event["exact_match"], event["rouge_l"]) = (exact.into(), rouge.into());
    event
}

/// Answer scores are shown next to the loss if present; scores of repeated steps are dropped.
#[test]
fn scores_of_answers_are_shown() -> Result<()> {
    let resume = json!({"event": "resume", "step": 1, "steps": 2});
    let dir = folder(&[start(2), eval(0, 3.0), step(1, 2.0), step(2, 1.0), scored(2, 0.25, 0.9), resume])?;
    let m = Metrics::read(&dir.path().join("metrics.jsonl"))?;
    assert!(m.evals.values().flat_map(|e| e.scores).all(f64::is_nan));
    assert!(!whole(&dir)?.contains("ROUGE-L"));
    let dir = folder(&[start(2), eval(0, 3.0), step(1, 2.0), step(2, 1.0), scored(2, 0.25, 0.4375), end(2)])?;
    let html = whole(&dir)?;
    says(
        &html,
        &["<th scope=\"col\">exact match</th><th scope=\"col\">ROUGE-L</th></tr>", "<td>0.4375</td></tr>"],
    );
    assert!(!html.contains("regex match"));
    Ok(())
}

#[test]
fn metrics_of_tasks_are_drawn() -> Result<()> {
    let with = |n: u64, of: &[(&str, f64)]| {
        let mut event = step(n, 0.5);
        of.iter().for_each(|(key, x)| event[*key] = json!(x));
        event
    };
    let pairs = [
        ("accuracy", 0.5),
        ("margins", 0.25),
        ("rewards_chosen", 0.125),
        ("rewards_rejected", -0.125),
        ("logps_chosen", -30.0),
        ("logps_rejected", -31.0),
    ];
    let html = whole(&folder(&[start(2), with(1, &pairs), with(2, &pairs)])?)?;
    says(&html, &["Margin of rewards", "Rewards", "Log-probabilities", "Accuracy", "rejected", "pairs"]);
    assert!(!html.contains("Distillation"), "no teacher");
    let taught = [("kd", 2.0), ("ce", 3.0)];
    let html = whole(&folder(&[start(2), with(1, &taught), with(2, &taught)])?)?;
    says(&html, &["Distillation", "divergence from the teacher"]);
    assert!(!html.contains("Log-probabilities"), "no pairs");
    Ok(())
}

/// Answers that are scored stand beside the wanted ones, with a curve of their scores.
#[test]
fn answers_and_their_curve_are_shown() -> Result<()> {
    let answer = |step: u64, reply: &str, rouge: f64| {
        json!({
            "event": "answer", "step": step, "prompt": "Sky?", "reply": reply, "reference": "Arr, blue.",
            "exact_match": false, "rouge_l": rouge,
        })
    };
    let lines = [start(2), step(1, 2.0), scored(1, 0.0, 0.25), answer(1, "Grey.", 0.25), step(2, 1.0)];
    let later = [scored(2, 0.0, 0.75), answer(2, "Blue.", 0.75)];
    let last = [sample(2, "b", "2"), sample(2, "a", "1"), end(2)];
    let html = whole(&folder(&[&lines[..], &later, &last].concat())?)?;
    says(
        &html,
        &[
            "id=\"scores\"",
            "ROUGE-L: from 0.2500 at step 1 to 0.7500 at step 2",
            "Asked: <q>Sky?</q> Wanted: <q>Arr, blue.</q>",
            "<th scope=\"row\">1</th><th>0.2500</th><td>Grey.</td>",
            "<th scope=\"row\">2</th><th>0.7500</th><td>Blue.</td>",
        ],
    );
    assert!(html.find("<q>b</q>") < html.find("<q>a</q>"), "prompts are in the order of the recipe");
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
    assert_eq!(m.evals.into_iter().map(|(step, e)| (step, e.loss)).collect::<Vec<_>>(), [(4, 1.5)]);
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
fn a_folder_without_a_run_is_refused_by_name() -> Result<()> {
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
    let out = dir.path().join("metrics.jsonl/page.html");
    let e = write(&[dir.path().to_path_buf()], Some(&out)).err().context("written")?;
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
    write(&runs, Some(&out))?;
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
    write(&[runs[0].clone(), runs[0].clone()], Some(&out))?;
    let html = std::fs::read_to_string(&out)?;
    let folder = runs[0].display().to_string().replace('/', "&#x2f;");
    ensure!(html.contains(&folder) && html.contains("In the recipes: nothing"), "{html}");
    let many = vec![runs[0].clone(); MAX_RUNS + 1];
    ensure!(write(&many, Some(&out)).is_err_and(|e| e.exit_code() == ExitCode::Usage));
    Ok(())
}
