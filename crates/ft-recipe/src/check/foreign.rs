//! Keys and values of other programs, for hints: transformers and TRL (T), axolotl (A), LLaMA-Factory
//! (L), torchtune (U), Unsloth (S), PEFT (P).

use crate::keys::first_entries;

/// Foreign keys, with the equivalent key of `ft` or advice on the replacement.
pub(super) const KEYS: &[(&str, &str)] = &[
    ("accumulate_grad_batches", ACCUMULATION),
    ("adam_beta1", "optimizer.betas"),                         // T L
    ("adam_beta2", "optimizer.betas"),                         // T L
    ("adam_epsilon", "optimizer.eps"),                         // T L
    ("adapter", "method (lora or full, of a [[train]] rule)"), // A
    ("assistant_only_loss", "data.mask (\"assistant\" is the default of conversations)"), // T
    ("base_model", "model.source"),                            // A
    ("batch_size", "run.batch_rows"),                          // U
    ("bf16", DTYPE),                                           // T A L
    ("checkpointer", "model.source"),                          // U
    ("clip_grad_norm", "run.clip"),                            // U
    ("completion_only_loss", "data.mask"),                     // T
    ("cutoff_len", "data.max_length"),                         // L
    ("data_files", "source"),                                  // A
    ("dataset", "data.train"),                                 // L U
    ("dataset_dir", "source (the path of the rows)"),          // L
    ("dataset_num_proc", "nothing: all cores are used"),       // T S
    ("dataset_prepared_path", "nothing: tokens are kept by themselves, see data.cache"), // A
    ("dataset_text_field", "fields = { text = \"the file's name\" } of a source"), // T S
    ("datasets", "data.train"),                                // A
    ("ddp_timeout", "parallel.timeout"),                       // T L
    ("decoded", "memory.dequantize (\"per_matmul\" for panels, \"per_layer\" for visit)"),
    ("deepspeed", "parallel.zero and memory.offload"), // T A L
    ("do_eval", "data.eval"),                          // T L
    ("do_train", "nothing: ft run trains, ft eval evaluates"), // T L
    ("early_stopping_patience", "run.patience"),       // T A
    ("enable_activation_checkpointing", "memory.recompute"), // U
    ("enable_activation_offloading", "memory.offload = [\"activations\"]"), // U
    ("eval_dataset", "data.eval"),                     // T L
    ("eval_sample_packing", "data.pack"),              // A
    ("eval_steps", "run.eval_every"),                  // T A L
    ("eval_strategy", "run.eval_every"),               // T A L
    ("evals_per_epoch", "run.eval_every"),             // A
    ("evaluation_strategy", "run.eval_every"),         // T
    ("field_messages", "fields = { messages = \"the file's name\" } of a source"), // A
    ("finetuning_type", "method (lora or full, of a [[train]] rule)"), // L
    ("flash_attention", ATTENTION),                    // A
    ("flash_attn", ATTENTION),                         // L
    ("fp16", DTYPE),                                   // T A L
    ("freeze_trainable_layers", "layers of a [[train]] rule with method = \"full\""), // L
    ("fsdp", "parallel.data and parallel.zero"),       // T A
    ("galore_rank", "optimizer.name = \"galore\""),    // L
    ("generation_max_length", "generate.max_new_tokens"), // T
    ("gradient_accumulation_steps", ACCUMULATION),     // T A L U S
    ("gradient_checkpointing", "memory.recompute"),    // T A
    ("group_by_length", "data.pack"),                  // T A
    ("hub_model_id", "nothing: ft push uploads a result"), // T A
    ("init_lora_weights", "lora.init"),                // P
    ("layers_to_transform", "layers"),                 // P
    ("learning_rate", "optimizer.lr"),                 // T A L S
    ("load_best_model_at_end", "run.keep_best"),       // T A
    ("load_in_4bit", "model.quantize"),                // A S
    ("load_in_8bit", "model.quantize (\"nf4\")"),      // A
    ("logging_steps", "nothing: each step is in metrics.jsonl"), // T A L S
    ("lora_alpha", "alpha"),                           // P A L U S
    ("lora_attn_modules", "modules"),                  // U
    ("lora_dropout", "dropout"),                       // P A L U S
    ("lora_model_dir", "lora.init"),                   // A
    ("lora_modules_to_save", "a [[train]] rule with method = \"full\""), // A
    ("lora_r", "rank"),                                // A
    ("lora_rank", "rank"),                             // L U
    ("lora_target", "modules"),                        // L
    ("lora_target_linear", "modules = [\"attention\", \"mlp\"]"), // A
    ("lora_target_modules", "modules"),                // A
    ("loraplus_lr_ratio", "optimizer.lr_scale_b"),     // A L
    ("lr_scheduler", "optimizer.schedule"),            // A U
    ("lr_scheduler_type", "optimizer.schedule"),       // T L S
    ("max_grad_norm", "run.clip"),                     // T A L S
    ("max_length", "data.max_length"),                 // T
    ("max_samples", "run.steps"),                      // L
    ("max_seq_len", "data.max_length"),                // U
    ("max_seq_length", "data.max_length"),             // T S
    ("max_steps", "run.steps"),                        // T A L S
    ("max_steps_per_epoch", "run.steps"),              // U
    ("micro_batch_size", "run.micro_rows"),            // A
    ("mixed_precision", DTYPE),                        // T
    ("model_max_length", "data.max_length"),
    ("model_name", "model.source"),                                       // S
    ("model_name_or_path", "model.source"),                               // T L
    ("model_type", "nothing: config.json of the model says it"),          // A
    ("modules_to_save", "a [[train]] rule with method = \"full\""),       // P
    ("neftune_noise_alpha", "data.neftune"),                              // T A L
    ("num_epochs", "run.epochs"),                                         // A
    ("num_train_epochs", "run.epochs"),                                   // T L S
    ("optim", "optimizer.name"),                                          // T L S
    ("output_dir", "run.output"),                                         // T A L U S
    ("overwrite_cache", "data.cache"),                                    // L
    ("overwrite_output_dir", "nothing: ft run --overwrite"),              // T L
    ("packed", "data.pack"),                                              // U
    ("packing", "data.pack"),                                             // T L S
    ("pad_to_sequence_len", "nothing: no token is computed for padding"), // A
    ("path", "source"),                                                   // A
    ("peft_layers_to_transform", "layers"),                               // A
    ("peft_use_dora", "dora"),                                            // A
    ("peft_use_rslora", "rslora"),                                        // A
    ("per_device_eval_batch_size", "run.micro_rows"),                     // T L
    ("per_device_train_batch_size", "run.micro_rows"),                    // T L S
    ("pissa_init", "lora.init = \"pissa\""),                              // L
    ("predict_with_generate", "generate.samples"),                        // T L
    ("preprocessing_num_workers", "nothing: all cores are used"),         // L
    ("pure_bf16", DTYPE),                                                 // L
    ("push_to_hub", "nothing: ft push uploads a result"),                 // T
    ("quantization_bit", "model.quantize"),                               // L
    ("r", "rank"),                                                        // P S
    ("random_state", "run.seed"),                                         // S
    ("remove_unused_columns", "nothing: unused keys of rows are told"),   // T
    ("report_to", "log.tensorboard"),                                     // T L
    ("resume_from_checkpoint", "nothing: ft run --resume"),               // T A L U
    ("sample_packing", "data.pack"),                                      // A
    ("save_steps", "run.save_every"),                                     // T A L S
    ("save_strategy", "run.save_every"),                                  // T
    ("save_total_limit", "run.keep"),                                     // T A L
    ("saves_per_epoch", "run.save_every"),                                // A
    ("seq_len", "data.max_length"),                                       // U
    ("sequence_len", "data.max_length"),                                  // A
    ("shuffle_merged_datasets", "data.shuffle"),                          // A
    ("special_tokens", "nothing: the model's tokenizer has them"),        // A
    ("stage", "task"),                                                    // L
    ("streaming", "nothing: tokens are read from disk as rows are made"), // T A L
    ("strict", "nothing: an unknown key is always an error"),             // A
    ("target_modules", "modules"),                                        // P S
    ("tokenized_path", "nothing: tokens are kept by themselves, see data.cache"), // L
    ("tokenizer", "nothing: the model's own is used"),                    // U
    ("tokenizer_type", "nothing: the model's own is used"),               // A
    ("torch_dtype", "model.dtype"),                                       // T
    ("train_on_inputs", "data.mask (\"none\" supervises all)"),           // A
    ("train_on_prompt", "data.mask (\"none\" supervises all)"),           // L
    ("trust_remote_code", "nothing: no code of a model is ever run"),     // T A L
    ("use_dora", "dora"),                                                 // P L
    ("use_gradient_checkpointing", "memory.recompute"),                   // S
    ("use_liger_kernel", "nothing: kernels of that kind are always used"), // T
    ("use_rslora", "rslora"),                                             // P L S
    ("val_set_size", "data.eval_share"),                                  // A
    ("val_size", "data.eval_share"),                                      // L
    ("wandb_project", "log.tensorboard"),                                 // A
    ("warmup", "optimizer.warmup_steps"),
    ("xformers_attention", ATTENTION), // A
];

const ACCUMULATION: &str = "run.batch_rows (rows a step; accumulation follows from run.micro_rows)";
const ATTENTION: &str = "nothing: attention is always of that kind";
const DTYPE: &str = "model.dtype = \"bf16\", \"f16\" or \"f32\"";

/// Key of `ft`, foreign value, and replacement.
pub(super) const VALUES: &[(&str, &str, &str)] = &[
    ("data.mask", "all", "\"none\" supervises every token"),
    ("data.mask", "completion_only", "\"completion\""),
    ("data.over_length", "left", "\"truncate\" cuts at the end, \"drop\" leaves the sample out"),
    ("data.train.0.format", "chat", "\"messages\""),
    ("data.train.0.format", "chat_template", "\"messages\""),
    (
        "data.train.0.format",
        "chatml",
        "\"messages\"; the chat template is the model's, or data.chat_template",
    ),
    ("data.train.0.format", "instruction", "\"alpaca\""),
    ("data.train.0.format", "openai", "\"messages\""),
    ("data.train.0.format", "pretrain", "\"text\""),
    ("data.train.0.format", "raw", "\"text\""),
    ("data.train.0.format", "sharegpt", "\"messages\" reads ShareGPT's conversations too"),
    ("memory.recompute", "true", "\"all\", or \"auto\" for as few layers as fit"),
    ("memory.recompute", "unsloth", "\"all\" with memory.offload = [\"activations\"]"),
    ("model.dtype", "auto", "leave the key out: bf16 on CUDA, f32 on the CPU"),
    ("model.dtype", "bfloat16", "\"bf16\""),
    ("model.dtype", "float16", "\"f16\""),
    ("model.dtype", "float32", "\"f32\""),
    ("model.dtype", "fp16", "\"f16\""),
    ("model.dtype", "fp32", "\"f32\""),
    ("model.dtype", "half", "\"f16\""),
    ("model.quantize", "4bit", "\"nf4\""),
    ("model.quantize", "bitsandbytes", "\"nf4\""),
    ("model.quantize", "bnb", "\"nf4\""),
    ("model.quantize", "int4", "\"nf4\""),
    ("optimizer.name", "adam", "\"adamw\"; with weight_decay = 0 it is Adam"),
    ("optimizer.name", "adamw_8bit", "\"adamw8bit\""),
    ("optimizer.name", "adamw_bnb_8bit", "\"adamw8bit\""),
    ("optimizer.name", "adamw_hf", "\"adamw\""),
    ("optimizer.name", "adamw_torch", "\"adamw\""),
    ("optimizer.name", "adamw_torch_fused", "\"adamw\""),
    ("optimizer.name", "galore_adamw", "\"galore\""),
    ("optimizer.name", "paged_adamw_32bit", "\"adamw\" with memory.offload = [\"optimizer\"]"),
    ("optimizer.name", "paged_adamw_8bit", "\"adamw8bit\" with memory.offload = [\"optimizer\"]"),
    ("optimizer.schedule", "constant_with_warmup", "\"constant\" with optimizer.warmup_steps"),
    ("optimizer.schedule", "cosine_with_min_lr", "\"cosine\" with optimizer.min_lr"),
    ("optimizer.schedule", "linear_with_warmup", "\"linear\" with optimizer.warmup_steps"),
    ("run.device", "gpu", "\"cuda\""),
    ("train.0.method", "none", "\"freeze\""),
    ("train.0.method", "qlora", "\"lora\" with model.quantize = \"nf4\""),
];

/// The replacement for another program's value, for the key at a dotted path with any list index.
pub(super) fn value(path: &str, theirs: &str) -> Option<&'static str> {
    let path = first_entries(path).replace("data.eval.0.", "data.train.0.");
    let theirs = theirs.to_lowercase();
    VALUES.iter().find(|(key, v, _)| *key == path && *v == theirs).map(|(.., ours)| *ours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{Kind, each_key, find_key};

    fn paths() -> Vec<String> {
        let mut all = Vec::new();
        each_key(&mut |path, _| all.push(path.to_string()));
        all
    }

    /// Keys named in hints exist.
    #[test]
    fn our_keys_are_keys() {
        let paths = paths();
        for (theirs, ours) in KEYS {
            let word = ours.split([' ', '(']).next().unwrap_or_default();
            let is =
                |p: &String| p == word || p.replace(".0", "") == word || p.ends_with(&format!(".{word}"));
            let known = paths.iter().any(is) || word == "nothing:" || word == "a";
            assert!(known, "{theirs}: {ours}");
            // A key of `ft` is never looked up here.
            assert!(!paths.contains(&theirs.to_string()), "{theirs} is ours");
        }
        assert!(KEYS.is_sorted_by(|a, b| a.0 < b.0), "in order, each once");
        assert!(VALUES.is_sorted_by(|a, b| (a.0, a.1) < (b.0, b.1)), "in order, each once");
    }

    #[test]
    fn values_are_of_keys_with_words() {
        for (path, theirs, _) in VALUES {
            match find_key(path).map(|key| key.kind) {
                Some(Kind::Word(words)) => assert!(words.iter().all(|(w, _)| w != theirs), "{path} {theirs}"),
                Some(Kind::Recompute) => {}
                other => panic!("{path}: {other:?}"),
            }
        }
        assert_eq!(
            value("data.eval.3.format", "ShareGPT"),
            Some("\"messages\" reads ShareGPT's conversations too")
        );
        assert_eq!(value("run.device", "cuda"), None);
    }
}
