//! Charts, series and heat maps.

use super::*;
use crate::report::plot::{Chart, Curve, LineStyle, Range, Series, duration, evenly, grouped, moment, short};

#[test]
fn steps_without_a_number_are_gaps() -> Result<()> {
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
fn series_have_medians_smooth_curves_and_short_numbers() {
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
fn the_load_of_experts_is_shown_by_layer() -> Result<()> {
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
        "s6\" d=\"M64.0 8h100.5v22h-100.5z\"",
        "s0\" d=\"M164.5 8h301.5v22h-301.5z\"",
        "s4\" d=\"M265.0 30h100.5",
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
    Ok(())
}

/// Steps and values at the ends of their types have a place: JSON writes a coordinate that is none as null.
#[test]
fn extreme_steps_and_values_are_drawn() -> Result<()> {
    const BILLIONS: u64 = 1_000_000_000_000_000_000;
    let tiny = f64::from_bits(1);
    for steps in
        [(0, 0), (0, 1), (1, BILLIONS), (BILLIONS, BILLIONS + 1), (u64::MAX - 1, u64::MAX), (0, u64::MAX)]
    {
        for (first, last) in [
            (0.0, 0.0),
            (1e299, -1e299),
            (tiny, 1e299),
            (1.0, 1.0 + f64::EPSILON),
            (tiny, 2.0 * tiny),
            (-tiny, -tiny),
            (f64::NAN, 1.0),
            (f64::INFINITY, 1.0),
            (-1e299, -1e-299),
            (0.0, tiny),
        ] {
            let points = Series(vec![(steps.0, first), (steps.1, last)]);
            let curve = Curve { label: "loss", style: LineStyle::Dots, points };
            let range = Range { steps, resumed: &[BILLIONS] };
            for id in ["loss", "lr"] {
                let chart = Chart::new(id, "Loss", std::slice::from_ref(&curve), &range, &[]);
                let text = serde_json::to_string(&chart.context("a chart")?)?;
                for bad in ["null", "NaN", "inf"] {
                    ensure!(!text.contains(bad), "{steps:?} {first} {last}: {bad} in {text}");
                }
            }
        }
    }
    Ok(())
}

/// A short run is not called smoothed, and a caption does not tell the chart again.
#[test]
fn captions_do_not_repeat_their_charts() -> Result<()> {
    let short: Vec<Value> =
        std::iter::once(start(3)).chain((1..=3).map(|s| step(s, 2.0 / s as f64))).collect();
    let html = whole(&folder(&short)?)?;
    assert!(!html.contains("moothed") && !html.contains("<p class=\"about\">Training loss"), "{html}");
    says(&html, &["<p class=\"about\">Mean cross-entropy of a supervised token, in nats.</p>"]);
    let long: Vec<Value> =
        std::iter::once(start(200)).chain((1..=200).map(|s| step(s, 2.0 / s as f64))).collect();
    let html = whole(&folder(&long)?)?;
    says(&html, &["exponential mean over some 4 steps", "smoothed over 4 steps"]);
    Ok(())
}
