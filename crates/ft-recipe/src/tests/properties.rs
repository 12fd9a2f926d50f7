//! Properties of all recipes, and of arbitrary files.

use super::*;
use crate::syntax::quote;
use proptest::prelude::*;

/// Overrides that are valid in any combination.
fn overrides() -> impl Strategy<Value = Vec<String>> {
    let one = |choices: &'static [&'static str]| prop::sample::select(choices).prop_map(str::to_string);
    let name = "[a-zA-Z0-9 _.\"'é-]{0,12}x";
    let fixed = (
        one(&[
            "train.0.layers=all",
            "train.0.layers=2-9",
            "train.0.layers=4-",
            "train.0.layers=-3:",
            "train.0.layers=[1,5]",
        ]),
        one(&[
            "train.0.rank=3",
            "train.0.experts=0-3",
            "train.0.experts=all",
            "train.0.modules=['/a\\\\.b/', 'q_proj']",
            "train.0.dora=true",
        ]),
        one(&["lora.init=a/b", "lora.alpha=7.25", "lora.rslora=true", "lora.dropout=0.05"]),
        one(&[
            "run.steps=12",
            "run.epochs=0.5",
            "run.epochs=3",
            "run.clip=0",
            "run.save_every=epoch/4",
            "run.save_every=2.5%",
        ]),
        one(&[
            "optimizer.warmup_steps=5",
            "optimizer.warmup_ratio=0.03",
            "optimizer.schedule=linear",
            "optimizer.decay=all",
        ]),
        one(&[
            "memory.recompute=3",
            "memory.recompute=none",
            "memory.dequantize=per_matmul",
            "model.dtype=f32",
            "model.weights=random",
        ]),
        one(&[
            "data.mask=none",
            "data.train.0.mask=none",
            "data.over_length=drop",
            "data.pack=false",
            "data.train.0.fields={messages='m \"x\"'}",
        ]),
        one(&[
            "model.override={a=[1,2.5,{b=true}],\"c d\"='e\\\\'}",
            "data.template={t=false}",
            "data.chat_template=t.jinja",
        ]),
    );
    (fixed, name, 0u64..=i64::MAX as u64, 1e-12f64..1.0, 1usize..9).prop_map(
        |((a, b, c, d, e, f, g, h), name, seed, lr, micro)| {
            let mut all = vec![a, b, c, d, e, f, g, h];
            all.push(format!("name={}", quote(&name)));
            all.push(format!("model.source={}", quote(&name)));
            all.push(format!("run.seed={seed}"));
            all.push(format!("optimizer.lr={lr:?}"));
            all.push(format!("run.micro_rows={micro}"));
            all.push(format!("run.batch_rows={}", micro * 3));
            all
        },
    )
}

proptest! {
    /// The resolved recipe parses to an equal recipe.
    #[test]
    fn resolved_recipes_read_back(overrides in overrides()) {
        let first = Recipe::parse(SMALL, "small.toml", &overrides).unwrap_or_else(|e| panic!("{e}"));
        let text = first.to_toml();
        let second = Recipe::parse(&text, "recipe.toml", &[]).unwrap_or_else(|e| panic!("{e}\n{text}"));
        prop_assert_eq!(format!("{:?}", first.write()), format!("{:?}", second.write()));
        prop_assert_eq!(first.math_keys(), second.math_keys());
        prop_assert_eq!(text, second.to_toml());
    }

    /// Any deletion from, insertion into, or override of a recipe is answered without a panic, and every
    /// problem of a file has a line.
    #[test]
    fn no_bytes_panic(which in 0usize..8, at in 0.0f64..1.0, cut in 0usize..40, put in prop::collection::vec(any::<u8>(), 0..12), over in "\\PC{0,20}") {
        let mut bytes = SHIPPED[which % SHIPPED.len()].text.as_bytes().to_vec();
        let start = (bytes.len() as f64 * at) as usize;
        let end = (start + cut).min(bytes.len());
        bytes.splice(start..end, put);
        let overrides = [format!("run.{over}"), format!("train.0.layers={over}"), over];
        for o in [&overrides[..0], &overrides] {
            if let Err(e) = Recipe::build(&bytes, Path::new("x.toml"), o, false) {
                let shown = e.render(true);
                prop_assert!(!shown.is_empty());
                for p in e.problems() {
                    prop_assert!(p.place.line > 0 || p.place.file.starts_with("command line: "), "{}", p.message);
                }
            }
        }
    }
}
