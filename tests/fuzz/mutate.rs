//! Mutations for generic bytes, lines, and JSON.

use super::dice::Dice;
use serde_json::{Map, Value, json};

/// Numbers at the limits of types, in JSON and TOML syntax; some are not valid JSON.
pub const NUMBERS: &str = "0 1 -1 2 3 7 10 64 127 255 256 65535 65536 100000 10000000 2147483647 2147483648 -2147483648 \
    4294967295 4294967296 9007199254740993 9223372036854775807 9223372036854775808 -9223372036854775808 \
    18446744073709551615 18446744073709551616 340282366920938463463374607431768211456 0.0 -0.0 0.5 1.0 \
    1.5 -1.5 1e-320 1e-45 1e-7 1e30 3.5e38 1e300 1.7976931348623157e308 1e400 -1e400 1e-400 NaN nan \
    Infinity inf -inf 0x10 1_000 01 +1 .5 1.";

/// Strings that often break programs.
pub fn odd_text(d: &mut Dice) -> String {
    const TEXTS: &[&str] = &[
        "",
        " ",
        "\0",
        "\n",
        "a",
        "none",
        "null",
        "true",
        "nan",
        "é",
        "ﷺ",
        "𝔘",
        "e\u{301}",
        "\u{202E}abc",
        "\u{FEFF}",
        "\u{E000}",
        "\u{FFFF}",
        "\u{85}",
        "\u{9b}31m",
        "\x1b[31mred\x1b[0m",
        "\x1b]0;title\x07",
        "\r",
        "\r\n",
        "\u{7f}",
        "\u{2028}",
        ".",
        "..",
        "../x",
        "/",
        "/dev/null",
        "/dev/zero",
        "/proc/self/mem",
        "m",
        "m/config.json",
        "a\\b",
        "\\",
        "C:\\x",
        "'",
        "\"",
        "`",
        "$(id)",
        "%s%n",
        "%1000000000d",
        "{{ 1 }}",
        "{% for",
        "{}",
        "<script>alert(1)</script>",
        "</style>",
        "&amp;",
        "(",
        "(a+)+$",
        "(?:a{1000}){1000}",
        "[",
        "\\p{L}",
        "(?=a)",
        "*",
        "/.*/",
        "0",
        "-1",
        "1e999",
        "0-5",
        "-6:",
        "5-0",
        "all",
        "auto",
        "48GiB",
        "99999999999TiB",
        "-1GiB",
        "bf16",
        "q_proj",
        "model.layers.0.self_attn.q_proj",
        "<|im_start|>",
        "<|im_end|>",
        "Ġ",
        "assistant",
        "user",
        "hf://x",
        "https://example.com/x",
        "someone/something",
        "someone/../..",
    ];
    match d.below(40) {
        0 => "a".repeat(1 << d.below(18)),
        1 => "é🦀".repeat(1 << d.below(14)),
        2 => "(".repeat(1 << d.below(15)),
        3 => format!("{}{}", d.pick(TEXTS), d.pick(TEXTS)),
        4 => d.pick(TEXTS).repeat(1 + d.below(300)),
        5 => char::from_u32(d.below(0x3000) as u32).unwrap_or('?').to_string(),
        6 => d.word(NUMBERS).to_string(),
        _ => d.pick(TEXTS).to_string(),
    }
}

/// Separators and fragments of text formats.
const PIECES: &[&str] = &[
    "{", "}", "[", "]", "[[", "]]", ":", ",", "\"", "'", "\"\"\"", "=", "\n", "\r", "\\", "\\u", "\\ud800",
    "\\u0000", "null", "true", "{}", "[]", "#", "//", "{%", "%}", "{{", "}}", "{#", "-", "_", "\0",
    "\u{FEFF}",
];

/// Applies one to four edits to bytes. `other` is a second seed to copy pieces from.
pub fn bytes(d: &mut Dice, data: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..1 + d.below(4) {
        let len = data.len();
        let at = d.below(len + 1);
        match d.below(12) {
            0 | 1 if len > 0 => data[at.min(len - 1)] ^= 1 << d.below(8),
            2 if len > 0 => {
                data[at.min(len - 1)] = *d.pick(&[0, 1, 9, 10, 13, 0x1b, 0x20, 0x7f, 0x80, 0xc0, 0xfe, 0xff])
            }
            3 => {
                let new: Vec<u8> = (0..1 + d.below(16)).map(|_| d.next() as u8).collect();
                data.splice(at..at, new);
            }
            4 => drop(data.drain(d.range(len, 64))),
            5 => {
                let part = data[d.range(len, 256)].to_vec();
                (0..1 + d.below(3)).for_each(|_| drop(data.splice(at..at, part.clone())));
            }
            6 => {
                let part = other[d.range(other.len(), 256)].to_vec();
                let end = (at + d.below(64)).min(len);
                data.splice(at..end, part);
            }
            7 if d.once_in(4) => data.truncate(at),
            8 => number(d, data),
            9 => {
                let (a, b) = (d.range(len, 64), d.range(len, 64));
                let (x, y) = (data[a.clone()].to_vec(), data[b].to_vec());
                data.splice(a, y);
                data.splice(at.min(data.len())..at.min(data.len()), x);
            }
            10 if d.once_in(8) => {
                let deep = d.pick(&[64, 128, 1000, 100_000]);
                data.splice(at..at, d.pick(&["[", "{\"a\":", "(", "{{", "[["]).repeat(*deep).into_bytes());
            }
            _ => drop(data.splice(at..at, d.pick(PIECES).bytes())),
        }
    }
}

/// Replaces a number in the data.
fn number(d: &mut Dice, data: &mut Vec<u8>) {
    let from = d.below(data.len() + 1);
    let digit = |b: &u8| b.is_ascii_digit();
    let Some(start) = data[from..].iter().position(digit).map(|i| from + i) else { return };
    let end = data[start..].iter().position(|b| !digit(b)).map_or(data.len(), |i| start + i);
    data.splice(start..end, d.word(NUMBERS).bytes());
}

/// Duplicates, removes, swaps or copies lines (from `other`), or changes the value of a `KEY = VALUE`.
pub fn lines(d: &mut Dice, data: &mut Vec<u8>, other: &[u8]) {
    let mut all: Vec<Vec<u8>> = data.split(|b| *b == b'\n').map(<[u8]>::to_vec).collect();
    let others: Vec<&[u8]> = other.split(|b| *b == b'\n').collect();
    for _ in 0..1 + d.below(3) {
        let (at, to) = (d.below(all.len()), d.below(all.len() + 1));
        match d.below(6) {
            0 => all.insert(to, all[at].clone()),
            1 if all.len() > 1 => drop(all.remove(at)),
            2 if to < all.len() => all.swap(at, to),
            3 => all.insert(to, d.pick(&others).to_vec()),
            _ => {
                if let Some(equals) = all[at].iter().position(|b| *b == b'=') {
                    all[at].truncate(equals + 1);
                    all[at].extend(toml_value(d, 0).bytes());
                }
            }
        }
    }
    *data = all.join(&b'\n');
}

/// A random value in TOML syntax.
pub fn toml_value(d: &mut Dice, depth: usize) -> String {
    let some = |d: &mut Dice| (0..d.below(4)).map(|_| toml_value(d, depth + 1)).collect::<Vec<_>>();
    match d.below(if depth > 3 { 6 } else { 9 }) {
        0..3 => d.word(NUMBERS).to_string(),
        3 => d.pick(&["true", "false", "2026-01-01", "''", "\"\\u0000\"", "{}", "[]"]).to_string(),
        4 | 5 => json!(odd_text(d)).to_string(),
        6 => format!("[{}]", some(d).join(", ")),
        7 => {
            let keys = ["source", "format", "rank", "a", "a.b", "\"\""];
            let pairs: Vec<_> = some(d).iter().map(|v| format!("{} = {v}", d.pick(&keys))).collect();
            format!("{{ {} }}", pairs.join(", "))
        }
        _ => "[".repeat(1 << d.below(12)),
    }
}

/// Serializes `value` after one to three structural changes. `other` is a second seed to copy values from.
///
/// Values not representable in serde_json (NaN, duplicate keys, lone surrogates, invalid UTF-8, nesting
/// of 100,000 levels) are written in place of placeholders.
pub fn json(d: &mut Dice, value: &Value, other: &Value) -> Vec<u8> {
    let mut raws = Vec::new();
    let mut value = value.clone();
    for _ in 0..1 + d.below(3) {
        change(d, &mut value, other, &mut raws);
    }
    fill(if d.once_in(4) { format!("{value:#}") } else { value.to_string() }.into_bytes(), &raws)
}

/// Size limit in bytes for a text with raw values, so that memory use depends on the contents and not on
/// the file size.
const LONGEST: usize = 2 << 20;

/// Placeholder for raw bytes until serialization.
fn placeholder(i: usize) -> String {
    format!("\u{E000}{i}\u{E001}")
}

fn raw(raws: &mut Vec<Vec<u8>>, bytes: impl Into<Vec<u8>>) -> Value {
    raws.push(bytes.into());
    placeholder(raws.len() - 1).into()
}

fn fill(mut text: Vec<u8>, raws: &[Vec<u8>]) -> Vec<u8> {
    // A later raw value may contain an earlier placeholder.
    for (i, bytes) in raws.iter().enumerate().rev() {
        let wanted = json!(placeholder(i)).to_string().into_bytes();
        // A copied value also copies the placeholder.
        while text.len() < LONGEST
            && let Some(at) = text.windows(wanted.len()).position(|w| w == wanted)
        {
            text.splice(at..at + wanted.len(), bytes.clone());
        }
    }
    text
}

/// A random node of a tree; descends with probability 3/4 per level.
fn somewhere<'a>(d: &mut Dice, mut value: &'a mut Value) -> &'a mut Value {
    while !d.once_in(4) {
        let len = children(value);
        if len == 0 {
            break;
        }
        let at = d.below(len);
        value = match value {
            Value::Array(a) => &mut a[at],
            Value::Object(o) => o.values_mut().nth(at).expect("counted"),
            _ => unreachable!("it has children"),
        };
    }
    value
}

fn children(value: &Value) -> usize {
    match value {
        Value::Array(a) => a.len(),
        Value::Object(o) => o.len(),
        _ => 0,
    }
}

fn change(d: &mut Dice, value: &mut Value, other: &Value, raws: &mut Vec<Vec<u8>>) {
    let mut other = other.clone();
    let copied = match d.once_in(2) {
        true => somewhere(d, &mut other).clone(),
        false => somewhere(d, &mut value.clone()).clone(),
    };
    let at = somewhere(d, value);
    match d.below(10) {
        0..4 => *at = odd_value(d, raws),
        4 => *at = copied,
        5 => *at = if d.once_in(2) { json!([at.clone()]) } else { json!({ "a": at.clone() }) },
        _ => match at {
            Value::Object(o) => object(d, o, copied, raws),
            Value::Array(a) => {
                let i = d.below(a.len());
                match d.below(5) {
                    0 => a.clear(),
                    1 if !a.is_empty() => drop(a.remove(i)),
                    2 if !a.is_empty() => {
                        let more = if d.once_in(8) { 3000 } else { 1 };
                        let again = a[i].clone();
                        a.extend(std::iter::repeat_n(again, more));
                    }
                    3 => a.push(odd_value(d, raws)),
                    _ => a.insert(i, copied),
                }
            }
            Value::String(s) => text(d, s),
            Value::Number(n) => {
                let x = n.as_f64().unwrap_or(0.0);
                let near = [x + 1.0, x - 1.0, -x, x * 2.0, x / 2.0, x * 1000.0, x.powi(2)];
                let near = *d.pick(&near);
                *at = match near.fract() == 0.0 && near.abs() < 9e15 {
                    true => (near as i64).into(),
                    false => near.into(),
                };
            }
            _ => *at = odd_value(d, raws),
        },
    }
}

fn object(d: &mut Dice, o: &mut Map<String, Value>, copied: Value, raws: &mut Vec<Vec<u8>>) {
    let Some(key) = o.keys().nth(d.below(o.len())).cloned() else {
        o.insert(odd_text(d), copied);
        return;
    };
    match d.below(6) {
        0 | 1 => drop(o.remove(&key)),
        2 => {
            let value = o.remove(&key).unwrap_or_default();
            let mut name = key.clone();
            text(d, &mut name);
            o.insert(name, value);
        }
        3 => drop(o.insert(odd_text(d), copied)),
        4 => {
            // A duplicate key with another value.
            let second = odd_value(d, raws);
            let twice = format!("{},{}:{second}", o[&key], json!(key));
            o.insert(key, raw(raws, twice));
        }
        _ => drop(o.insert(key, odd_value(d, raws))),
    }
}

/// Edits the characters of a string.
fn text(d: &mut Dice, s: &mut String) {
    let chars: Vec<char> = s.chars().collect();
    let range = d.range(chars.len(), 8);
    let part = |r: &[char]| r.iter().collect::<String>();
    let (before, within, after) =
        (part(&chars[..range.start]), part(&chars[range.clone()]), part(&chars[range.end..]));
    *s = match d.below(5) {
        0 => odd_text(d),
        1 => format!("{before}{after}"),
        2 => format!("{before}{within}{within}{after}"),
        3 => before,
        _ => format!("{before}{}{after}", odd_text(d)),
    };
}

/// A random value of any kind.
pub fn odd_value(d: &mut Dice, raws: &mut Vec<Vec<u8>>) -> Value {
    match d.below(20) {
        0 => Value::Null,
        1 | 2 => json!(d.once_in(2)),
        3..9 => {
            let n = d.word(NUMBERS);
            serde_json::from_str(n).unwrap_or_else(|_| raw(raws, n))
        }
        9..13 => odd_text(d).into(),
        13 => json!([]),
        14 => json!({}),
        15 => Value::Array((0..1 + d.below(4)).map(|_| odd_value(d, raws)).collect()),
        16 => json!({ odd_text(d): odd_value(d, raws) }),
        17 => raw(
            raws,
            *d.pick(&[
                &b"\"\\ud800\""[..],
                b"\"\xff\xfe\"",
                b"\"\\ud83d\\u0041\"",
                b"\"a\nb\"",
                b"'a'",
                b"\"",
                b"undefined",
            ]),
        ),
        18 => {
            let deep = *d.pick(&[20, 127, 129, 5000, 100_000]);
            match d.once_in(2) {
                true => raw(raws, format!("{}{}", "[".repeat(deep), "]".repeat(deep))),
                false => raw(raws, format!("{}1{}", "{\"a\":".repeat(deep), "}".repeat(deep))),
            }
        }
        _ => Value::Array(vec![odd_text(d).into(); 1 << d.below(10)]),
    }
}

/// Mutates valid JSON structurally, anything else as bytes.
pub fn json_text(d: &mut Dice, seed: &[u8], other: &[u8]) -> Vec<u8> {
    let values = (serde_json::from_slice(seed), serde_json::from_slice(other));
    if let (Ok(value), Ok(other)) = values
        && !d.once_in(4)
    {
        return json(d, &value, &other);
    }
    let mut data = seed.to_vec();
    bytes(d, &mut data, other);
    data
}

/// Mutates one or a few lines of a JSON lines file; sometimes the whole file as bytes.
pub fn json_lines(d: &mut Dice, seed: &[u8], other: &[u8]) -> Vec<u8> {
    let mut data = seed.to_vec();
    match d.below(8) {
        0 => bytes(d, &mut data, other),
        1 => lines(d, &mut data, other),
        _ => {
            let mut all: Vec<Vec<u8>> = data.split(|b| *b == b'\n').map(<[u8]>::to_vec).collect();
            let others: Vec<&[u8]> = other.split(|b| *b == b'\n').collect();
            for _ in 0..1 + d.below(2) {
                let at = d.below(all.len());
                let other = *d.pick(&others);
                all[at] = json_text(d, &all[at], other);
            }
            data = all.join(&b'\n');
        }
    }
    data
}
