//! Every module of a model that holds weights, by the name that checkpoint and PEFT use, from config alone.

use super::config::Config;

/// The groups that a recipe's `train.modules` can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// q, k, v and o.
    Attention,
    /// Dense (and shared-expert) feed-forward linears.
    Mlp,
    /// Experts' linears.
    Experts,
    /// Routers, and the gates of shared experts.
    Router,
    /// All norms.
    Norms,
    /// The token embedding.
    Embedding,
    /// The output head.
    Head,
}

impl Group {
    /// The name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Group::Attention => "attention",
            Group::Mlp => "mlp",
            Group::Experts => "experts",
            Group::Router => "router",
            Group::Norms => "norms",
            Group::Embedding => "embedding",
            Group::Head => "head",
        }
    }
}

/// What a module computes, with its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `y = x W^T + b`, W [out, inp].
    Linear {
        /// Output features.
        out: usize,
        /// Input features.
        inp: usize,
        /// Whether there is a bias `[out]`.
        bias: bool,
    },
    /// RMSNorm with a weight `[dim]`.
    Norm {
        /// Features.
        dim: usize,
    },
    /// A table [vocab, dim].
    Embedding {
        /// Rows.
        vocab: usize,
        /// Columns.
        dim: usize,
    },
}

/// One module.
#[derive(Clone, Debug)]
pub struct Module {
    /// Full name, `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Its group.
    pub group: Group,
    /// Its decoder layer.
    pub layer: Option<usize>,
    /// Its expert.
    pub expert: Option<usize>,
}

impl Module {
    /// The last component of the name.
    pub fn last(&self) -> &str {
        self.name.rsplit('.').next().unwrap_or(&self.name)
    }

    /// Shape of the weight.
    pub fn weight_shape(&self) -> Vec<usize> {
        match self.kind {
            Kind::Linear { out, inp, .. } => vec![out, inp],
            Kind::Norm { dim } => vec![dim],
            Kind::Embedding { vocab, dim } => vec![vocab, dim],
        }
    }

    /// Size of the bias, where there is one.
    pub fn bias(&self) -> Option<usize> {
        match self.kind {
            Kind::Linear { out, bias: true, .. } => Some(out),
            _ => None,
        }
    }

    /// The unit of the walk that holds it: 0 embedding, 1.. layers, last the final norm and head.
    pub fn unit(&self, layers: usize) -> usize {
        match self.layer {
            Some(l) => l + 1,
            None if self.group == Group::Embedding => 0,
            None => layers + 1,
        }
    }
}

/// All modules in the order of the forward pass.
pub fn modules(c: &Config) -> Vec<Module> {
    let mut out = Vec::new();
    let mut add = |name: String, kind, group, layer, expert| {
        out.push(Module { name, kind, group, layer, expert });
    };
    let d = c.hidden;
    let linear = |out, inp, bias| Kind::Linear { out, inp, bias };
    add(
        "model.embed_tokens".into(),
        Kind::Embedding { vocab: c.vocab, dim: d },
        Group::Embedding,
        None,
        None,
    );
    for l in 0..c.layers {
        let p = format!("model.layers.{l}");
        let at = Some(l);
        add(format!("{p}.input_layernorm"), Kind::Norm { dim: d }, Group::Norms, at, None);
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        for (name, out, inp, bias) in [
            ("q_proj", q, d, c.biases.qkv),
            ("k_proj", kv, d, c.biases.qkv),
            ("v_proj", kv, d, c.biases.qkv),
            ("o_proj", d, q, c.biases.o),
        ] {
            add(format!("{p}.self_attn.{name}"), linear(out, inp, bias), Group::Attention, at, None);
        }
        if c.family.qk_norm {
            for name in ["q_norm", "k_norm"] {
                add(format!("{p}.self_attn.{name}"), Kind::Norm { dim: c.head_dim }, Group::Norms, at, None);
            }
        }
        add(format!("{p}.post_attention_layernorm"), Kind::Norm { dim: d }, Group::Norms, at, None);
        match (&c.moe, &c.family.experts) {
            (Some(moe), Some(names)) if moe.sparse[l] => {
                let block = format!("{p}.{}", names.block);
                add(format!("{block}.gate"), linear(moe.experts, d, false), Group::Router, at, None);
                for e in 0..moe.experts {
                    let [gate, up, down] = names.names;
                    for (name, out, inp) in [(gate, moe.width, d), (up, moe.width, d), (down, d, moe.width)] {
                        let name = format!("{block}.experts.{e}.{name}");
                        add(name, linear(out, inp, false), Group::Experts, at, Some(e));
                    }
                }
                if moe.shared > 0 {
                    let f = moe.shared;
                    for (name, out, inp) in [("gate_proj", f, d), ("up_proj", f, d), ("down_proj", d, f)] {
                        let name = format!("{block}.shared_expert.{name}");
                        add(name, linear(out, inp, false), Group::Mlp, at, None);
                    }
                    let name = format!("{block}.shared_expert_gate");
                    add(name, linear(1, d, false), Group::Router, at, None);
                }
            }
            _ => {
                let f = c.intermediate;
                for (name, out, inp) in [("gate_proj", f, d), ("up_proj", f, d), ("down_proj", d, f)] {
                    add(format!("{p}.mlp.{name}"), linear(out, inp, c.biases.mlp), Group::Mlp, at, None);
                }
            }
        }
    }
    add("model.norm".into(), Kind::Norm { dim: d }, Group::Norms, None, None);
    add("lm_head".into(), linear(c.vocab, d, false), Group::Head, None, None);
    out
}

/// Total number of parameters (a tied head counts once).
pub fn parameters(c: &Config) -> u64 {
    modules(c)
        .iter()
        .filter(|m| !(c.tied && m.group == Group::Head))
        .map(|m| m.weight_shape().iter().product::<usize>() as u64 + m.bias().unwrap_or(0) as u64)
        .sum()
}
