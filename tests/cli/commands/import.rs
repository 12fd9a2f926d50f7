//! `ft import`: configurations of other toolkits.

use crate::world::{World, repository};

/// A configuration of axolotl with the quickstart's model and rows.
fn axolotl() -> String {
    let data = repository().join("data");
    format!(
        "base_model: {0}/model\nadapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_linear: true\nsequence_len: 128\n\
         datasets:\n  - path: {0}/quickstart/train.jsonl\n    type: chat_template\nmicro_batch_size: 2\n\
         gradient_accumulation_steps: 2\nmax_steps: 2\nlearning_rate: 1e-3\noptimizer: adamw_torch\n\
         output_dir: out\nflash_attention: true\nload_in_8bit: true\nsurprise: 7\n",
        data.display()
    )
}

#[test]
fn an_imported_recipe_runs() {
    let w = World::new();
    w.write("mine.yml", axolotl());
    let r = w.ok(&["import", "mine.yml"]);
    for line in [
        "mine.yml: axolotl, 17 keys",
        "    10  micro_batch_size              run.micro_rows = 2",
        "run.batch_rows = 4: 2 rows x 2 x 1 rank(s)",
        "not supported",
        "    18  surprise                      = 7: no known key of axolotl",
    ] {
        assert!(r.out.contains(line), "{line}\n{}", r.out);
    }
    assert!(r.err.contains("next: ft check mine.toml"), "{}", r.err);
    w.ok(&["check", "mine.toml"]);
    w.ok(&["run", "mine.toml"]);
    assert_eq!(w.steps("out").len(), 2);
    let again = w.ft(&["import", "mine.yml"]);
    assert_eq!(again.code, 2, "{}", again.err);
    assert!(again.err.contains("--overwrite"), "{}", again.err);
    w.ok(&["import", "mine.yml", "--overwrite", "--out", "mine.toml"]);
    // a recipe with problems is there too
    w.write("other.yml", axolotl().replace("lora_target_linear: true", "lora_target_modules: [nothing]"));
    let other = w.ft(&["import", "other.yml"]);
    assert!(other.code == 2 && other.err.contains("matches no module"), "{}: {}", other.code, other.err);
    assert!(other.err.contains("other.toml is written") && w.path("other.toml").exists(), "{}", other.err);
}

/// Preferences of TRL and of LLaMA-Factory, whose data sets are described beside them.
#[test]
fn an_imported_preference_recipe_runs() {
    let w = World::new();
    let pair = "{\"instruction\": \"What is red?\", \"chosen\": \"A rose.\", \"rejected\": \"No.\"}\n";
    w.write("rows/pairs.json", format!("[{}]", [pair.trim_end(); 4].join(",")));
    w.write("pairs.jsonl", pair.repeat(4).replace("instruction", "prompt"));
    let columns = r#"{"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}"#;
    let info =
        format!("{{\"mine\": {{\"file_name\": \"pairs.json\", \"ranking\": true, \"columns\": {columns}}}}}");
    w.write("rows/dataset_info.json", info);
    let model = repository().join("data/model").display().to_string();
    w.write(
        "trl.sh",
        format!(
            "python examples/scripts/dpo.py --model_name_or_path {model} --dataset_name pairs.jsonl --use_peft \\\n  \
             --loss_type ipo --per_device_train_batch_size 2\n"
        ),
    );
    w.write(
        "factory.yaml",
        format!(
            "model_name_or_path: {model}\nstage: dpo\npref_loss: simpo\nfinetuning_type: lora\ndataset: mine\n\
             dataset_dir: rows\nmax_samples: 3\nper_device_train_batch_size: 1\nlora_rank: 4\n"
        ),
    );
    for (file, recipe, pairs) in [("trl.sh", "trl.toml", 2), ("factory.yaml", "factory.toml", 1)] {
        w.ok(&["import", file]);
        w.ok(&[
            "run",
            recipe,
            "run.steps=1",
            "run.output=out",
            "run.device=cpu",
            "model.dtype=f32",
            "--overwrite",
        ]);
        let step = &w.events("out", "step")[0];
        assert_eq!(step["pairs"], pairs, "{step}");
    }
}

#[test]
fn import_needs_no_files_and_refuses_other_tasks() {
    let w = World::new();
    w.write("a.sh", "trl sft --model_name_or_path no/model --dataset_name nowhere/rows --use_peft\n");
    w.ok(&["import", "a.sh"]);
    w.write("b.sh", "trl grpo --model_name_or_path no/model --dataset_name nowhere/rows\n");
    let r = w.ft(&["import", "b.sh"]);
    assert_eq!(r.code, 2, "{}", r.err);
    assert!(r.err.contains("grpo") && !w.path("b.toml").exists(), "{}", r.err);
    w.write("c.yaml", "a: [1\n");
    let r = w.ft(&["import", "c.yaml"]);
    assert_eq!(r.code, 2, "{}", r.err);
    assert!(r.err.contains("c.yaml: line "), "{}", r.err);
}
