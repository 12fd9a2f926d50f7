//! Shipped recipes, and the figures in their header comments.

use super::*;
use crate::plan::Model;

/// Every shipped recipe can be planned offline, for the CPU and for CUDA.
#[test]
fn shipped_recipes_plan_offline() -> anyhow::Result<()> {
    for s in SHIPPED {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        let mut r = Recipe::load_for_plan(&root.join("recipes").join(format!("{}.toml", s.name)), &[])?;
        // Paths in shipped recipes are relative to the root of the repository.
        let local = root.join(&r.model.source);
        assert!(local.exists() || r.run.save_every.recurs(), "{}: a killed run begins anew", s.name);
        if local.exists() {
            r.model.source = local.display().to_string();
        }
        for cuda in [false, true] {
            let (p, _) = of_recipe(&r, cuda)?;
            assert!(p.total() > 0 && p.parameters.1 > 0, "{}", s.name);
            let json = p.json(None);
            let parts: u64 = json["device"]
                .as_object()
                .into_iter()
                .flatten()
                .filter(|(k, _)| *k != "total" && *k != "budget")
                .filter_map(|(_, v)| v.as_u64())
                .sum();
            assert_eq!(Some(parts), json["device"]["total"].as_u64(), "{}", s.name);
        }
    }
    Ok(())
}

/// Recipes with commands and their first line in the header: the memory of the cards.
const HEADS: &[(&str, &[&str])] = &[
    ("qwen3-8b-48gb-full", &["48GB"]),
    ("qwen3-8b-qlora", &["48GB", "24GB"]),
    ("llama-3.1-8b-qlora", &["48GB", "24GB"]),
    ("qwen3-14b-qlora", &["48GB", "24GB"]),
    ("qwen3-32b-qlora", &["48GB"]),
    ("llama-3.3-70b-qlora", &["48GB"]),
    ("qwen3-30b-a3b-qlora", &["48GB"]),
    ("qwen3-30b-a3b-24gb-qlora", &["24GB"]),
    ("mixtral-8x7b-qlora-experts", &["48GB"]),
    ("qwen3.5-9b-qlora", &["48GB", "24GB"]),
    ("qwen3.5-27b-qlora", &["48GB", "24GB"]),
    ("qwen3.5-35b-a3b-qlora", &["48GB"]),
    ("gemma-3-12b-qlora", &["24GB", "48GB"]),
    ("gemma-3-27b-qlora", &["48GB", "24GB"]),
    ("gemma-4-e4b-qlora", &["24GB"]),
    ("gemma-4-31b-qlora", &["48GB", "24GB"]),
    ("gemma-4-26b-a4b-qlora", &["48GB", "24GB"]),
    ("gpt-oss-20b-lora", &["24GB", "48GB"]),
];

/// The command in a header prints the line below it, on a machine without the card and the rows.
#[test]
fn heads_of_shipped_recipes_have_the_plan_s_figures() -> anyhow::Result<()> {
    let mut wrong = String::new();
    for (name, cards) in HEADS {
        let path =
            Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(format!("recipes/{name}.toml"));
        let text = std::fs::read_to_string(&path)?;
        for card in *cards {
            let mut set = vec![format!("memory.budget={card}"), "run.device=cuda".into()];
            set.push("data.train.0.source=rows.jsonl".into());
            let host =
                HOSTS.iter().find(|(n, _)| n == name).map_or(String::new(), |(_, host)| format!(" {host}"));
            set.extend(host.split_whitespace().map(String::from));
            let (p, _) = of_recipe_in(&Recipe::load_for_plan(&path, &set)?, true, &Capacity::UNKNOWN)?;
            assert!(p.fits(), "{name} on {card}: {}", p.headline());
            let want = format!("# Plan    ft plan {name} --gpu {card}{host}\n#         {}\n", p.headline());
            if !text.contains(&want) {
                wrong += &want;
            }
        }
    }
    assert!(wrong.is_empty(), "heads should say\n{wrong}");
    Ok(())
}

/// Columns of the table in docs/devices.md.
const CARDS: [&str; 5] = ["12 GB", "16 GB", "24 GB", "48 GB", "80 GB"];

/// The table in docs/devices.md has the cards with room for a recipe.
#[test]
fn the_page_of_devices_has_the_cards_of_the_plans() -> anyhow::Result<()> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let page = std::fs::read_to_string(root.join("docs/devices.md"))?;
    assert!(page.contains(&format!("| {} |", CARDS.join(" | "))), "the columns are {CARDS:?}");
    let (mut rows, mut wrong) = (0, String::new());
    for s in SHIPPED {
        let begin = format!("| `{}` |", s.name);
        let Some(row) = page.lines().find(|l| l.starts_with(&begin)) else { continue };
        let mut want = begin;
        for card in CARDS {
            let set = [format!("memory.budget={}", card.replace(' ', "")), "run.device=cuda".into()];
            let path = root.join(format!("recipes/{}.toml", s.name));
            let recipe = Recipe::load_for_plan(&path, &set)?;
            let (p, _) = Model::find(&recipe)?.plan(&recipe, Target::from(true), &Capacity::UNKNOWN)?;
            let tight = p.kept_back().is_some_and(|(reserve, left)| left < reserve);
            want += match (p.fits(), tight) {
                (false, _) => " |",
                (true, false) => " ✓ |",
                (true, true) => " ✓ (tight) |",
            };
        }
        rows += 1;
        if row != want {
            wrong += &format!("{want}\n");
        }
    }
    assert!(rows >= 18 && wrong.is_empty(), "{rows} rows; the table should say\n{wrong}");
    Ok(())
}

/// Recipes whose plan moves inputs to the host, and the host's memory in the command.
const HOSTS: &[(&str, &str)] = &[
    ("qwen3-8b-48gb-full", "memory.host_budget=64GiB"),
    ("llama-3.3-70b-qlora", "memory.host_budget=64GiB"),
    ("qwen3-30b-a3b-qlora", "memory.host_budget=64GiB"),
    ("qwen3-30b-a3b-24gb-qlora", "memory.host_budget=64GiB"),
];

/// With states on the host and updates in the backward pass, Qwen3-8B trains in full on one card:
/// weights, the largest unit's gradients, and activations remain on the device. 8-bit moments take a
/// quarter of f32 ones.
#[test]
fn qwen3_8b_trains_in_full_on_one_card() -> anyhow::Result<()> {
    let (name, offload) = ("optimizer.name=adamw8bit", "memory.offload=['optimizer']");
    let set = ["memory.budget=38GiB", "run.batch_rows=1", "run.clip=0", "data.max_length=4096"];
    let of = |more: &[&str]| plan("Qwen/Qwen3-8B", &full(), &[&set[..], more].concat(), true);
    let kept = "optimizer.master=f32";
    let p = of(&[name, offload, kept, "optimizer.in_backward=true"])?;
    assert!(p.fits() && p.total() <= 38 << 30, "{}", p.total());
    let n = p.parameters.1;
    // of the head, with the final norm
    let largest = 4 * (151_936 + 1) * 4096;
    assert_eq!(p.peak.bytes.get(Component::Gradients), largest);
    let states =
        |p: &Plan| p.space.host.iter().find(|(k, _)| *k == "offloaded_optimizer").map_or(0, |(_, b)| *b);
    let rounded = |per_value: f64| (per_value * n as f64) as u64;
    assert!(states(&p).abs_diff(rounded(6.0 + 8.0 / 256.0)) < n / 1000, "{}", states(&p));
    // all three settings are needed
    assert!(!of(&[name, offload])?.fits() && !of(&[name, kept, "optimizer.in_backward=true"])?.fits());
    assert!(states(&of(&[offload, "optimizer.in_backward=true"])?) > states(&p) + 5 * n);
    // without f32 master weights nothing is on the host: 4 bytes per parameter plus scales
    let p = of(&[name, "optimizer.in_backward=true"])?;
    assert!(p.fits() && p.total() <= 38 << 30, "{}", p.total());
    assert_eq!((states(&p), p.peak.bytes.get(Component::Master), p.theory.master), (0, 0, 0));
    assert_eq!(p.peak.bytes.get(Component::Gradients), largest);
    let held = p.peak.bytes.get(Component::Trained) + p.peak.bytes.get(Component::Moments);
    assert!(held.abs_diff(rounded(4.0 + 8.0 / 256.0)) < n / 1000, "{held}");
    assert!(p.details(None).contains("master      none of what trains in full"));
    Ok(())
}

#[test]
fn the_fixed_levels_are_what_the_recipe_says() -> anyhow::Result<()> {
    let (all, none) = (Recomputed::from(28), Recomputed::default());
    for (set, want) in [
        ("all", all),
        ("feed_forward", Recomputed { feed_forward: 28, ..none }),
        ("norms", Recomputed { norms: 28, ..none }),
        ("none", none),
        ("5", 5.into()),
    ] {
        let set = &*format!("memory.recompute={set}");
        let p = plan("Qwen/Qwen3-0.6B", &rule(LORA, ""), &[set, "memory.budget=1KiB"], false)?;
        assert_eq!(p.execution.recompute, want);
        assert!(!p.fits());
    }
    Ok(())
}
