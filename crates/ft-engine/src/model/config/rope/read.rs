//! Reads rotary embeddings from their tables in `config.json`.

use super::tables::{BASE, DEFAULT, KINDS, NONE, ROPE_PARAMETERS, in_effect, is_changed};
use super::{Rope, Scaling};
use crate::model::config::error::{Error, Result};
use crate::model::config::family::{Family, LOCAL, PARTIAL};
use crate::model::config::keys::Keys;
use crate::model::config::limits::POSITIONS;
use crate::model::config::rules::ROPE;
use crate::model::config::types::LayerAttention;
use ft_base::store::json::equal;
use serde_json::{Map, Value, json};
use std::ops::RangeInclusive;

/// Range of the base: above 1, with powers representable in f32.
const THETA: RangeInclusive<f64> = 1.000_001..=1e15;
/// Range of factors and lengths.
const FACTOR: RangeInclusive<f64> = 1e-6..=1e9;
/// Range of the share of a head's channels.
const SHARE: RangeInclusive<f64> = 0.0..=1.0;

/// Key of the context length in pre-training.
const ORIGINAL: &str = "original_max_position_embeddings";
/// Key of YaRN's rounding.
const TRUNCATE: &str = "truncate";

/// Name of NTK scaling by length.
const DYNAMIC: &str = "dynamic";

/// Names of LongRoPE; the second is Phi-3's alone.
const LONG: [&str; 2] = ["longrope", "su"];

/// Keys of a table without effect on the scaling.
const BESIDE: [&str; 5] = [BASE, KINDS[0], KINDS[1], "mrope_interleaved", "mrope_section"];

/// Keys read by a type of scaling.
fn keys_of(kind: &str) -> &'static [&'static str] {
    match kind {
        DEFAULT => &[],
        "linear" | DYNAMIC => &["factor"],
        "proportional" => &["factor", PARTIAL],
        "llama3" => &["factor", "high_freq_factor", "low_freq_factor", ORIGINAL],
        "yarn" => &[
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "factor",
            "mscale",
            "mscale_all_dim",
            ORIGINAL,
            TRUNCATE,
        ],
        _ => &["attention_factor", "factor", "long_factor", "short_factor", ORIGINAL],
    }
}

/// Reads the rotary embeddings of settled keys: one of all layers, or one of full and one of sliding layers.
pub(in crate::model::config) fn read(
    keys: &Keys<'_>,
    family: &Family,
    layers: &[LayerAttention],
    (head_dim, positions): (usize, usize),
) -> Result<Vec<Rope>> {
    let of = |((t, base), slides): ((&Keys<'_>, &str), bool)| -> Result<Rope> {
        check(keys, t, family)?;
        let dim =
            if family.two_ropes { dim_of(keys, layers, slides)? } else { rotary(keys, t, family, head_dim)? };
        let theta = match t.number(BASE, THETA)? {
            Some(theta) => theta,
            None if family.by_layer => return Err(t.bad(BASE, "missing")),
            None => keys.required(base, THETA)?,
        };
        Ok(Rope { theta, scaling: scaling(keys, t, family, (dim, positions))?, dim })
    };
    in_effect(keys, family)?.iter().zip([BASE, LOCAL]).zip([false, true]).map(of).collect()
}

/// Notes on keys of `file` not read by transformers, given the settled `keys`; an error for a key of overrides.
pub(in crate::model::config) fn unread(
    (file, keys): (&Keys<'_>, &Keys<'_>),
    family: &Family,
    ropes: &[Rope],
    overrides: &Map<String, Value>,
) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for t in in_effect(keys, family)? {
        let kind = kind_of(&t)?;
        let other = format!("rope_type is {kind}");
        for key in ROPE.iter().filter(|key| !BESIDE.contains(key)) {
            let is_read = keys_of(kind).contains(key) || (*key == PARTIAL && has_share(family));
            let (effect, why) = match *key {
                TRUNCATE if is_read => {
                    (json!(truncates(keys, &t, family)?), "it is read beside the layer types")
                }
                _ if is_read => continue,
                "factor" | PARTIAL => (json!(1.0), other.as_str()),
                _ => (Value::Null, other.as_str()),
            };
            notes.extend(idle(&t, key, (effect, why), overrides)?);
        }
    }
    for (i, key) in [BASE, LOCAL].into_iter().enumerate() {
        let theta = ropes.get(i).map(|r| r.theta);
        let why = theta.map_or("all layers have one base".into(), |t| format!("the base in effect is {t}"));
        notes.extend(idle(file, key, (json!(theta), &why), overrides)?);
    }
    if !has_share(family) {
        let of = |r: &Rope| if let Scaling::Proportional { share, .. } = r.scaling { share } else { 1.0 };
        let share = ropes.iter().map(of).fold(1.0, f64::min);
        let why = format!("the share in effect is {share}");
        notes.extend(idle(file, PARTIAL, (json!(share), &why), overrides)?);
    }
    if family.two_ropes {
        let why = "it is read in the tables of the layer types";
        notes.extend(idle(file, ORIGINAL, (Value::Null, why), overrides)?);
        let tables = keys.table(ROPE_PARAMETERS)?.unwrap_or_else(|| keys.over(&NONE));
        // Other overrides are put into the tables of the layer types.
        let is_new = overrides.contains_key(ROPE_PARAMETERS);
        let flat = ROPE.iter().filter(|key| **key != TRUNCATE && tables.get(key).is_some());
        for key in flat {
            notes.push(tables.without_effect(key, why, is_new)?);
        }
    }
    Ok(notes)
}

/// A note on a key without effect, unless its value is the one in effect; an error for a key of `overrides`.
fn idle(
    t: &Keys<'_>,
    key: &str,
    (effect, why): (Value, &str),
    overrides: &Map<String, Value>,
) -> Result<Option<String>> {
    let differs = t.get(key).is_some_and(|v| !equal(v, &effect));
    differs.then(|| t.without_effect(key, why, is_changed(&t.name(key), overrides))).transpose()
}

/// Rotated share of a head's channels, in the table or at the top level.
fn share(keys: &Keys<'_>, t: &Keys<'_>) -> Result<Option<f64>> {
    Ok(t.number(PARTIAL, SHARE)?.or(keys.number(PARTIAL, SHARE)?))
}

/// Error for the share read by [`share`].
fn bad_share(keys: &Keys<'_>, t: &Keys<'_>, why: String) -> Error {
    let table = if t.get(PARTIAL).is_some() { t } else { keys };
    table.bad(PARTIAL, why)
}

/// Whether a family's class without a scaling rotates a share of the channels; others rotate all.
fn has_share(family: &Family) -> bool {
    !family.two_ropes && (family.default_rotary < 1.0 || family.reads.contains(&PARTIAL))
}

/// Number of rotated channels of a head.
fn rotary(keys: &Keys<'_>, t: &Keys<'_>, family: &Family, head_dim: usize) -> Result<usize> {
    let rotary = (head_dim as f64 * share(keys, t)?.unwrap_or(family.default_rotary)) as usize;
    let (built, is_default) = (has_share(family) || rotary == head_dim, kind_of(t)? == DEFAULT);
    match built {
        true if rotary > 0 && rotary.is_multiple_of(2) => Ok(rotary),
        false if is_default => Ok(head_dim),
        _ => {
            let why = format!("{rotary} of {head_dim} channels; {} rotates ", family.model_type);
            let what = match built {
                true => "an even number",
                false => {
                    "all\n  hint: override = { partial_rotary_factor = 1.0 } under [model] keeps the scaling"
                }
            };
            Err(bad_share(keys, t, why + what))
        }
    }
}

/// Channels of a head of sliding or of full layers.
fn dim_of(keys: &Keys<'_>, layers: &[LayerAttention], slides: bool) -> Result<usize> {
    let mut dims = layers.iter().filter(|l| l.window.is_some() == slides).map(|l| l.head_dim);
    let first = dims.next().unwrap_or(2);
    if dims.any(|dim| dim != first) || !first.is_multiple_of(2) {
        let why = "an even head_dim is wanted, the same in all layers of a type";
        let by_layer = keys.get("per_layer_config").is_some();
        return Err(keys.bad(if by_layer { "per_layer_config" } else { "global_head_dim" }, why));
    }
    Ok(first)
}

/// Key of the name of the scaling in a table.
fn kind_key(t: &Keys<'_>) -> &'static str {
    KINDS.into_iter().find(|key| t.get(key).is_some()).unwrap_or(KINDS[0])
}

/// Name of the scaling in a table.
fn kind_of<'a>(t: &Keys<'a>) -> Result<&'a str> {
    Ok(t.string(kind_key(t))?.unwrap_or(DEFAULT))
}

/// Whether YaRN's range is rounded: transformers reads the key beside the layer types, not in their tables, and null as
/// false.
fn truncates(keys: &Keys<'_>, t: &Keys<'_>, family: &Family) -> Result<bool> {
    let beside = if family.two_ropes { keys.table(ROPE_PARAMETERS)? } else { None };
    let t = beside.as_ref().unwrap_or(t);
    Ok(t.flag(TRUNCATE)?.unwrap_or(!t.raw.contains_key(TRUNCATE)))
}

/// Refuses scalings not built for the family, or read differently by transformers 4 and 5.
fn check(keys: &Keys<'_>, t: &Keys<'_>, family: &Family) -> Result<()> {
    let kind = kind_of(t)?;
    let built: &[&str] = match (family.joint_qkv, family.two_ropes) {
        (true, _) => &[DEFAULT, LONG[0]],
        (false, true) => &[DEFAULT, DYNAMIC, "linear", "llama3", "proportional", "yarn"],
        (false, false) => &[DEFAULT, DYNAMIC, "linear", "llama3", LONG[0], "yarn"],
    };
    let name = if family.joint_qkv && kind == LONG[1] { LONG[0] } else { kind };
    if !built.contains(&name) {
        let why = format!("{kind}; {} is built with {}", family.model_type, built.join(", "));
        let hint = "override = { rope_scaling = { rope_type = \"default\" } } under [model] takes it out";
        return Err(t.bad(kind_key(t), format!("{why}\n  hint: {hint}")));
    }
    if !family.two_ropes {
        return Ok(());
    }
    if let Some(former) = t.string(KINDS[1])?.filter(|former| *former != kind) {
        let why = format!("{former}; transformers 5 takes rope_type, which is {kind}");
        let hint = format!("write rope_type = \"{former}\" in place of it");
        return Err(t.bad(KINDS[1], format!("{why}\n  hint: {hint}")));
    }
    match share(keys, t)?.filter(|share| *share != 1.0) {
        // Classes ignore a share without scaling, and fail on one with a scaling of all channels.
        Some(share) if ![DEFAULT, "proportional"].contains(&kind) => {
            let why = format!("{share}; 1 is wanted with rope_type {kind}, which rotates all channels");
            Err(bad_share(keys, t, why))
        }
        _ => Ok(()),
    }
}

/// The scaling in a table, of `dim` channels.
fn scaling(
    keys: &Keys<'_>,
    t: &Keys<'_>,
    family: &Family,
    (dim, positions): (usize, usize),
) -> Result<Scaling> {
    let kind = kind_of(t)?;
    let need = |key: &str| -> Result<f64> {
        t.number(key, FACTOR)?.ok_or_else(|| t.bad(key, format!("missing; rope_type {kind} needs it")))
    };
    let original = || -> Result<f64> {
        let top = if family.two_ropes { None } else { keys.number(ORIGINAL, FACTOR)? };
        Ok(top.or(t.number(ORIGINAL, FACTOR)?).unwrap_or(positions as f64))
    };
    Ok(match kind {
        DEFAULT => Scaling::Default,
        "linear" => Scaling::Linear { factor: need("factor")? },
        DYNAMIC => Scaling::Dynamic { factor: need("factor")?, positions },
        "llama3" => {
            let factor = need("factor")?;
            let (low, high) = (need("low_freq_factor")?, need("high_freq_factor")?);
            let original = original()?;
            if high <= low {
                let why = format!("{high}; more than low_freq_factor {low} is wanted");
                return Err(t.bad("high_freq_factor", why));
            }
            Scaling::Llama3 { factor, low, high, original }
        }
        "yarn" => {
            let original = original()?;
            let by_lengths = t.raw.get("factor").is_some_and(Value::is_null);
            let factor = if by_lengths { positions as f64 / original } else { need("factor")? };
            yarn(t, (factor, original), truncates(keys, t, family)?)?
        }
        "proportional" => Scaling::Proportional {
            factor: t.number("factor", FACTOR)?.unwrap_or(1.0),
            share: share(keys, t)?.unwrap_or(1.0),
        },
        _ => long(keys, t, (dim, positions))?,
    })
}

fn yarn(t: &Keys<'_>, (factor, original): (f64, f64), truncate: bool) -> Result<Scaling> {
    let mscale = |scale: f64, m: f64| if scale <= 1.0 { 1.0 } else { 0.1 * m * scale.ln() + 1.0 };
    let scales = 0.0..=1e3;
    let inferred = match (t.number("mscale", scales.clone())?, t.number("mscale_all_dim", scales)?) {
        (Some(a), Some(b)) if a != 0.0 && b != 0.0 => mscale(factor, a) / mscale(factor, b),
        _ => mscale(factor, 1.0),
    };
    let beta = |key: &str, default: f64| -> Result<f64> {
        // transformers treats 0 as the default.
        Ok(t.number(key, 0.0..=1e9)?.filter(|b| *b > 0.0).unwrap_or(default))
    };
    Ok(Scaling::Yarn {
        factor,
        attention: t.number("attention_factor", FACTOR)?.unwrap_or(inferred),
        beta_fast: beta("beta_fast", 32.0)?,
        beta_slow: beta("beta_slow", 1.0)?,
        original,
        truncate,
    })
}

/// LongRoPE as Phi-3 has it.
fn long(keys: &Keys<'_>, t: &Keys<'_>, (dim, positions): (usize, usize)) -> Result<Scaling> {
    let (top, own) = (keys.some(ORIGINAL, POSITIONS)?, t.some(ORIGINAL, POSITIONS)?);
    let original = top.or(own).unwrap_or(positions);
    if original < 2 {
        // The attention factor divides by its logarithm.
        let table = if top.is_some() { keys } else { t };
        return Err(table.bad(ORIGINAL, format!("{original}; 2 or more is wanted")));
    }
    let list = |key: &str| -> Result<Vec<f32>> {
        let own = t.get(key).and_then(|v| serde_json::from_value::<Vec<f32>>(v.clone()).ok());
        let fits = |f: &f32| FACTOR.contains(&f64::from(*f));
        own.filter(|l| l.len() == dim / 2 && l.iter().all(fits)).ok_or_else(|| {
            t.bad(key, format!("a list of {} factors is wanted, one for two channels", dim / 2))
        })
    };
    let stated = t.number("factor", FACTOR)?;
    let factor = stated.unwrap_or(positions as f64 / original as f64);
    let inferred = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
    let attention = t.number("attention_factor", FACTOR)?.unwrap_or(inferred);
    Ok(Scaling::Long { short: list("short_factor")?, long: list("long_factor")?, attention, original })
}
