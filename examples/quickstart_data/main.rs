//! Generates the data of the quickstart and the files of the shipped model, deterministically.
//!
//!     cargo run --release --example quickstart_data -- quickstart data/quickstart  # training, evaluation
//!     cargo run --release --example quickstart_data -- heads data/quickstart       # pairs and labels, of both
//!     cargo run --release --example quickstart_data -- preferences data/quickstart # pairs, rated answers
//!     cargo run --release --example quickstart_data -- pretrain OUT_DIR            # corpus
//!     cargo run --release --example quickstart_data -- tokenizer data/model        # tokenizer
//!     cargo run --release --example quickstart_data -- weights RUN/model data/model  # weights in bf16

#![allow(clippy::disallowed_methods, reason = "it writes the data of the quickstart")]

mod styles;
mod tables;
mod world;

use anyhow::{Context, Result, bail};
use ft::rng::{Purpose, Stream};
use half::bf16;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::json;
use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::path::Path;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, TokenizerBuilder};
use world::{Topic, upper};

const SEED: u64 = 2026;
/// Conversations for training and for evaluation.
const PRETRAIN: (usize, usize) = (30_000, 300);
/// Facts per topic for training in the new style, and facts reserved for evaluation.
const QUICKSTART: (usize, usize) = (40, 4);
/// Facts of a topic for the evaluation of a head; three times as many train it.
const HEADS: usize = 10;
/// Pairs for training and for evaluation.
const PREFERENCES: (usize, usize) = (240, 60);
const VOCABULARY: usize = 1024;

/// A sequence of random choices.
struct Dice {
    stream: Stream,
    next: u64,
}

impl Dice {
    fn new(stream: u64) -> Self {
        Self { stream: Stream::new(SEED, Purpose::Mix, 0, stream), next: 0 }
    }

    /// A uniform random number below `n`.
    fn below(&mut self, n: usize) -> usize {
        self.next += 1;
        ((u64::from(self.stream.word(self.next)) * n as u64) >> 32) as usize
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// Question and answer.
type Turn = (String, String);

/// A conversation.
struct Talk {
    system: Option<&'static str>,
    turns: Vec<Turn>,
}

/// Training and evaluation conversations.
type Split = (Vec<Talk>, Vec<Talk>);

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let out = Path::new(args.last().map_or(".", String::as_str));
    std::fs::create_dir_all(out).with_context(|| format!("{}", out.display()))?;
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["quickstart", _] => write_both(out, quickstart()),
        ["heads", _] => heads(out),
        ["preferences", _] => preferences(out),
        ["pretrain", _] => write_both(out, pretrain()),
        ["tokenizer", _] => tokenizer(out),
        ["weights", from, _] => weights(Path::new(from), out),
        _ => bail!(
            "usage: quickstart_data quickstart|heads|preferences|pretrain|tokenizer OUT_DIR, or weights MODEL_DIR OUT_DIR"
        ),
    }
}

/// Conversations of one to four turns about the world.
fn pretrain() -> Split {
    let topics = world::topics();
    let mut dice = Dice::new(1);
    let mut train: Vec<Talk> =
        (0..PRETRAIN.0 + PRETRAIN.1).map(|_| conversation(&mut dice, &topics)).collect();
    let eval = train.split_off(PRETRAIN.0);
    (train, eval)
}

fn conversation(dice: &mut Dice, topics: &[Topic]) -> Talk {
    let total: u32 = topics.iter().map(|t| t.weight).sum();
    let mut turns = Vec::new();
    let mut name = None;
    for _ in 0..*dice.pick(&[1, 1, 2, 3]) {
        match dice.below(12) {
            0 => turns.push(echo(dice)),
            // an introduction; a later turn asks for the name
            1 if name.is_none() => {
                let new = *dice.pick(tables::NAMES);
                let ask = *dice.pick(&["My name is {}.", "I am {}.", "Hello, I am {}.", "Call me {}."]);
                turns.push((ask.replace("{}", new), format!("Nice to meet you, {new}!")));
                name = Some(new);
            }
            _ => {
                let mut left = dice.below(total as usize) as u32;
                let topic = topics.iter().find(|t| {
                    let here = left < t.weight;
                    left = left.saturating_sub(t.weight);
                    here
                });
                if let Some(topic) = topic {
                    let fact = dice.pick(&topic.facts);
                    let ask = dice.pick(&fact.asks);
                    turns.push((typed(dice, ask), fact.reply.clone()));
                }
            }
        }
    }
    if let Some(name) = name {
        let ask = *dice.pick(&["What is my name?", "Who am I?", "Do you know my name?"]);
        turns.push((ask.to_owned(), format!("Your name is {name}.")));
    } else if dice.below(60) == 0 {
        turns.push(("What is my name?".to_owned(), "I do not know your name yet.".to_owned()));
    }
    if dice.below(5) > 1 {
        return Talk { system: None, turns };
    }
    let style = dice.pick(styles::KNOWN);
    for (_, reply) in &mut turns {
        *reply = style.speak(reply);
    }
    Talk { system: Some(style.system), turns }
}

/// Types a sixth of the questions in lower case without a final mark.
fn typed(dice: &mut Dice, ask: &str) -> String {
    if dice.below(6) == 0 { ask.trim_end_matches(['.', '?', '!']).to_lowercase() } else { ask.to_owned() }
}

fn echo(dice: &mut Dice) -> Turn {
    let count = 1 + dice.below(4);
    let words: Vec<&str> = (0..count).map(|_| *dice.pick(tables::WORDS)).collect();
    let text = words.join(" ");
    let ask = *dice.pick(&["Say: {}", "Repeat: {}", "Repeat after me: {}", "Please say: {}"]);
    (ask.replace("{}", &text), text)
}

/// The same questions answered in pirate style; evaluation facts do not occur in the training set.
fn quickstart() -> Split {
    let mut dice = Dice::new(2);
    let (mut train, mut eval) = (Vec::new(), Vec::new());
    let new = styles::pirate_facts();
    let redefined: HashSet<&String> = new.iter().flat_map(|f| &f.asks).collect();
    for (at, topic) in world::topics().iter().enumerate() {
        let facts: Vec<_> =
            topic.facts.iter().filter(|f| !f.asks.iter().any(|a| redefined.contains(a))).collect();
        let order = Stream::new(SEED, Purpose::Shuffle, 0, at as u64).permutation(facts.len() as u32);
        let spare = QUICKSTART.1.min(facts.len() / 4);
        for (i, &fact) in order.iter().map(|&j| &facts[j as usize]).take(QUICKSTART.0 + spare).enumerate() {
            let turn = (dice.pick(&fact.asks).clone(), styles::PIRATE.speak(&fact.reply));
            let talk = Talk { system: None, turns: vec![turn] };
            if i < spare { &mut eval } else { &mut train }.push(talk);
        }
    }
    for fact in &new {
        for (i, ask) in fact.asks.iter().enumerate() {
            let turn = (ask.clone(), styles::PIRATE.speak(&fact.reply));
            let last = i + 1 == fact.asks.len();
            if last { &mut eval } else { &mut train }.push(Talk { system: None, turns: vec![turn] });
        }
    }
    (train, eval)
}

/// Rows of a reward model, which prefers the pirate's answers to those of other styles, and of a classifier of answers
/// by style. Evaluation facts do not occur in the training sets.
fn heads(out: &Path) -> Result<()> {
    let mut dice = Dice::new(3);
    let mut rows: [Vec<serde_json::Value>; 4] = Default::default();
    for (at, topic) in world::topics().iter().enumerate() {
        let facts = &topic.facts;
        let order = Stream::new(SEED, Purpose::Shuffle, 1, at as u64).permutation(facts.len() as u32);
        for (i, fact) in order.iter().map(|j| &facts[*j as usize]).take(4 * HEADS).enumerate() {
            let held_out = usize::from(i < HEADS.min(facts.len() / 4));
            let ask = dice.pick(&fact.asks).clone();
            let chosen = styles::PIRATE.speak(&fact.reply);
            let rejected = match dice.below(4) {
                0 => fact.reply.clone(),
                _ => dice.pick(styles::KNOWN).speak(&fact.reply),
            };
            rows[held_out].push(json!({ "prompt": ask, "chosen": &chosen, "rejected": rejected }));
            let (label, text) = match dice.below(4) {
                0 => ("plain", fact.reply.clone()),
                1 => ("polite", styles::KNOWN[0].speak(&fact.reply)),
                2 => ("cowboy", styles::KNOWN[1].speak(&fact.reply)),
                _ => ("pirate", chosen),
            };
            rows[2 + held_out].push(json!({ "text": text, "label": label }));
        }
    }
    // answers to several questions
    let known: HashSet<String> = rows[3].iter().map(|row| row["text"].to_string()).collect();
    rows[2].retain(|row| !known.contains(&row["text"].to_string()));
    for (name, rows) in ["pairs-train", "pairs-eval", "labels-train", "labels-eval"].iter().zip(&rows) {
        let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
        let path = out.join(format!("{name}.jsonl"));
        std::fs::write(&path, &text).with_context(|| format!("{}", path.display()))?;
        println!("{}: {} rows, {} bytes", path.display(), rows.len(), text.len());
    }
    Ok(())
}

/// Answers of a farmer and of a robot to the same questions. The robot's are chosen where a question is about numbers,
/// the farmer's elsewhere, as often: no manner alone is right more often than by chance. Each answer is rated too. No
/// question of the evaluation occurs in training.
fn preferences(out: &Path) -> Result<()> {
    let mut dice = Dice::new(3);
    let [farmer, robot] = ["Talk like a farmer.", "Talk like a robot."]
        .map(|system| styles::KNOWN.iter().find(|style| style.system == system).unwrap_or(&styles::PIRATE));
    let topics = world::topics();
    let (mut numbers, mut others) = (Vec::new(), Vec::new());
    for fact in topics.iter().flat_map(|topic| &topic.facts) {
        let is_number = fact.reply.starts_with(|c: char| c.is_ascii_digit());
        if is_number { &mut numbers } else { &mut others }.push(fact);
    }
    let (train, eval) = PREFERENCES;
    let order = |n: usize, id| Stream::new(SEED, Purpose::Shuffle, 1, id).permutation(n as u32);
    let orders = [order(numbers.len(), 0), order(others.len(), 1)];
    let (mut asked, mut pairs) = (HashSet::new(), Vec::new());
    let mut next = [0, 0];
    while pairs.len() < train + eval {
        let kind = pairs.len() % 2;
        let facts = [&numbers, &others][kind];
        let Some(at) = orders[kind].get(next[kind]) else { bail!("too few facts for the pairs") };
        next[kind] += 1;
        let fact = facts[*at as usize];
        let ask = dice.pick(&fact.asks);
        if asked.insert(ask.clone()) {
            let answers = [robot.speak(&fact.reply), farmer.speak(&fact.reply)];
            pairs.push((ask, answers[kind].clone(), answers[1 - kind].clone()));
        }
    }
    let held_out = pairs.split_off(train);
    for (name, pairs) in [("train", pairs), ("eval", held_out)] {
        let (mut compared, mut rated) = (String::new(), String::new());
        for (prompt, chosen, rejected) in &pairs {
            let pair = json!({"prompt": said("user", prompt), "chosen": said("assistant", chosen),
                "rejected": said("assistant", rejected)});
            writeln!(compared, "{pair}")?;
            for (completion, label) in [(chosen, true), (rejected, false)] {
                let completion = said("assistant", completion);
                writeln!(
                    rated,
                    "{}",
                    json!({"prompt": said("user", prompt), "completion": completion, "label": label})
                )?;
            }
        }
        for (kind, text) in [("choices", compared), ("rated", rated)] {
            let path = out.join(format!("{kind}-{name}.jsonl"));
            std::fs::write(&path, &text).with_context(|| format!("{}", path.display()))?;
            println!("{}: {} rows, {} bytes", path.display(), text.lines().count(), text.len());
        }
    }
    Ok(())
}

/// A list of one message.
fn said(role: &str, content: &str) -> serde_json::Value {
    json!([{"role": role, "content": content}])
}

fn messages(talk: &Talk) -> serde_json::Value {
    let system = talk.system.map(|text| json!({"role": "system", "content": text}));
    let turns = talk.turns.iter().flat_map(|(ask, reply)| {
        [json!({"role": "user", "content": ask}), json!({"role": "assistant", "content": reply})]
    });
    let list: Vec<_> = system.into_iter().chain(turns).collect();
    json!({ "messages": list })
}

fn write_both(out: &Path, (train, eval): Split) -> Result<()> {
    for (name, rows) in [("train.jsonl", train), ("eval.jsonl", eval)] {
        let mut text = String::new();
        for row in &rows {
            writeln!(text, "{}", messages(row))?;
        }
        let path = out.join(name);
        std::fs::write(&path, &text).with_context(|| format!("{}", path.display()))?;
        println!("{}: {} rows, {} bytes", path.display(), rows.len(), text.len());
    }
    Ok(())
}

/// Trains byte-level BPE in the style of GPT-2 on the corpus and the pirate conversations.
fn tokenizer(out: &Path) -> Result<()> {
    let lines = [pretrain(), quickstart()].into_iter().flat_map(|(train, _)| train).flat_map(|talk| {
        let mut lines: Vec<String> =
            talk.system.iter().flat_map(|s| ["system", s]).map(str::to_owned).collect();
        for (ask, reply) in talk.turns {
            lines.extend(["user".to_owned(), upper(&ask), "assistant".to_owned(), reply]);
        }
        lines
    });
    let special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(|t| AddedToken::from(t, true));
    let mut trainer = BpeTrainerBuilder::new()
        .vocab_size(VOCABULARY)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(special.to_vec())
        .build();
    let mut tokenizer = TokenizerBuilder::new()
        .with_model(BPE::default())
        .with_normalizer(None::<tokenizers::NormalizerWrapper>)
        .with_pre_tokenizer(Some(ByteLevel::new(false, true, true)))
        .with_post_processor(Some(ByteLevel::new(false, false, true)))
        .with_decoder(Some(ByteLevel::default()))
        .build()
        .map_err(anyhow::Error::msg)?;
    tokenizer.train(&mut trainer, lines).map_err(anyhow::Error::msg)?;
    let path = out.join("tokenizer.json");
    tokenizer.save(&path, true).map_err(anyhow::Error::msg)?;
    println!("{}: {} tokens", path.display(), tokenizer.get_vocab_size(true));
    Ok(())
}

/// Merges the safetensors of a model into one file, with every tensor in bf16
/// (rounded to nearest, ties to even).
fn weights(from: &Path, out: &Path) -> Result<()> {
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for entry in std::fs::read_dir(from).with_context(|| format!("{}", from.display()))? {
        let path = entry?.path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path)?;
        let file = SafeTensors::deserialize(&bytes).with_context(|| format!("{}", path.display()))?;
        for (name, tensor) in file.iter() {
            let data = match tensor.dtype() {
                Dtype::BF16 => tensor.data().to_vec(),
                Dtype::F32 => tensor
                    .data()
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .flat_map(|b| bf16::from_f32(f32::from_le_bytes(*b)).to_le_bytes())
                    .collect(),
                other => bail!("{}: {name} is {other:?}; f32 and bf16 can be converted", path.display()),
            };
            tensors.push((name.to_owned(), tensor.shape().to_vec(), data));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, shape, data)| Ok((name.as_str(), TensorView::new(Dtype::BF16, shape.clone(), data)?)))
        .collect::<Result<Vec<_>>>()?;
    let path = out.join("model.safetensors");
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(views, Some(format), &path)
        .with_context(|| format!("{}", path.display()))?;
    println!("{}: {} tensors", path.display(), tensors.len());
    Ok(())
}
