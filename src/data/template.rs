//! Chat templates, rendered as transformers' `apply_chat_template` renders them.

use super::{error::Error, json, strftime};
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, ErrorKind, syntax::SyntaxConfig};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

/// Instructions that one rendering may take: well under a second, and far above what the longest conversation needs.
const FUEL: u64 = 8_000_000;
/// Bytes that one rendering may write.
const LIMIT: usize = 256 << 20;

/// Around what a template marks with `{% generation %}`. Unicode noncharacters: no text has a use for them, no
/// tokenizer a token, and rows that hold one are refused.
const GENERATION: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// Whether `c` is one of the noncharacters that stand for marks inside a rendering.
pub(super) fn is_reserved(c: char) -> bool {
    ('\u{FDD0}'..='\u{FDEF}').contains(&c)
}

/// Variables of a rendering, beside the messages.
pub(super) type Variables = BTreeMap<String, Value>;

/// A compiled chat template.
pub(super) struct Template {
    env: Environment<'static>,
    origin: String,
    has_tool_use: bool,
    has_generation: bool,
}

impl Template {
    /// Compiles `default`, and the template that transformers prefers when there are tools, if the model has one.
    pub fn new(origin: &str, default: &str, tool_use: Option<&str>) -> Result<Self, Error> {
        let mut this = Self {
            env: environment(),
            origin: origin.to_string(),
            has_tool_use: tool_use.is_some(),
            has_generation: false,
        };
        for (name, source) in [("default", Some(default)), ("tool_use", tool_use)] {
            let Some(source) = source else { continue };
            let (source, generation) = generation_blocks(source);
            this.has_generation |= generation;
            this.env.add_template_owned(name, source).map_err(|e| this.error(&e))?;
        }
        Ok(this)
    }

    /// Whether the template itself says what the assistant wrote.
    pub fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// The file that the template comes from.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The text of a conversation, and the byte ranges that the template marks as the assistant's.
    pub fn render(
        &self,
        messages: &[Value],
        tools: &Value,
        add_generation_prompt: bool,
        variables: &Variables,
    ) -> Result<(String, Vec<Range<usize>>), Error> {
        let mut context = variables.clone();
        let name = if self.has_tool_use && !tools.is_none() { "tool_use" } else { "default" };
        context.insert("messages".into(), Value::from(messages.to_vec()));
        context.insert("tools".into(), tools.clone());
        context.entry("documents".into()).or_insert(Value::from(()));
        context.insert("add_generation_prompt".into(), Value::from(add_generation_prompt));
        let template = self.env.get_template(name).map_err(|e| self.error(&e))?;
        let mut out = Limited(Vec::new());
        template.render_captured_to(Value::from(context), &mut out).map_err(|e| self.error(&e))?;
        let text = String::from_utf8(out.0).map_err(|_| self.fail(0, "it wrote text that is not UTF-8"))?;
        if self.has_generation { self.take_out_marks(&text) } else { Ok((text, Vec::new())) }
    }

    fn take_out_marks(&self, marked: &str) -> Result<(String, Vec<Range<usize>>), Error> {
        let mut text = String::with_capacity(marked.len());
        let mut spans = Vec::new();
        let mut open = None;
        for c in marked.chars() {
            if c == GENERATION[0] {
                if open.replace(text.len()).is_some() {
                    return Err(self.fail(0, "a {% generation %} block stands inside another"));
                }
            } else if c == GENERATION[1] {
                let start = open.take().ok_or_else(|| self.fail(0, "a {% generation %} block is cut"))?;
                if start < text.len() {
                    spans.push(start..text.len());
                }
            } else {
                text.push(c);
            }
        }
        if open.is_some() {
            return Err(self.fail(0, "a {% generation %} block is cut"));
        }
        Ok((text, spans))
    }

    fn fail(&self, line: usize, message: impl Into<String>) -> Error {
        Error::Template { origin: self.origin.clone(), line, message: message.into() }
    }

    fn error(&self, e: &minijinja::Error) -> Error {
        let message = match (e.kind(), e.detail()) {
            (ErrorKind::OutOfFuel, _) => "it does not come to an end".to_string(),
            (ErrorKind::WriteFailure, _) => format!("it writes more than {} MiB", LIMIT >> 20),
            (_, Some(detail)) => detail.to_string(),
            (kind, None) => kind.to_string(),
        };
        self.fail(e.line().unwrap_or(0), message)
    }
}

/// The functions, filters and white-space rules that transformers gives to a template.
fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_unknown_method_callback(|state, value, name, args| match (value.as_str(), args) {
        (Some(text), [arg]) if arg.as_str().is_some_and(|a| !a.is_empty()) => {
            match string_method(text, name, arg.as_str().unwrap_or_default()) {
                Some(out) => Ok(out),
                None => unknown_method_callback(state, value, name, args),
            }
        }
        _ => unknown_method_callback(state, value, name, args),
    });
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.unwrap_or_default());
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(100);
    env.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", |format: String| {
        strftime::now(&format).map_err(|m| minijinja::Error::new(ErrorKind::InvalidOperation, m))
    });
    env.add_filter("tojson", to_json);
    env.add_filter("ft_generation", |body: String| format!("{}{body}{}", GENERATION[0], GENERATION[1]));
    env
}

/// Python's string methods of one argument that templates use and pycompat does not have.
fn string_method(text: &str, name: &str, arg: &str) -> Option<Value> {
    Some(match name {
        "removeprefix" => text.strip_prefix(arg).unwrap_or(text).into(),
        "removesuffix" => text.strip_suffix(arg).unwrap_or(text).into(),
        "partition" => {
            let (a, b) = text.split_once(arg).map_or((text, None), |(a, b)| (a, Some(b)));
            [a, if b.is_some() { arg } else { "" }, b.unwrap_or_default()].into_iter().collect()
        }
        "rpartition" => {
            let (a, b) = text.rsplit_once(arg).map_or((None, text), |(a, b)| (Some(a), b));
            [a.unwrap_or_default(), if a.is_some() { arg } else { "" }, b].into_iter().collect()
        }
        _ => return None,
    })
}

/// `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as transformers defines it.
fn to_json(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<String, minijinja::Error> {
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = match indent {
        Some(i) => Some(i),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|i| !i.is_none()) {
        None => None,
        Some(i) => Some(match i.as_str() {
            Some(text) => text.to_string(),
            None => " ".repeat(usize::try_from(i)?.min(64)),
        }),
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    options.assert_all_used()?;
    let (item_separator, key_separator) = match separators {
        Some(two) if two.len() == 2 => (two[0].clone(), two[1].clone()),
        Some(_) => {
            return Err(minijinja::Error::new(
                ErrorKind::InvalidOperation,
                "tojson: separators are two strings",
            ));
        }
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
    };
    json::dumps(value, &json::Style { ensure_ascii, indent, item_separator, key_separator, sort_keys })
}

/// Writes `{% generation %}` blocks as blocks of a filter that puts marks around its body: white-space control,
/// line numbers and scoping stay as they are. Says whether there were any.
fn generation_blocks(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut found = false;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else { break };
        let inner = &tag[2..end];
        let (left, word) = match inner.strip_prefix(['-', '+']) {
            Some(w) => (&inner[..1], w),
            None => ("", inner),
        };
        let (word, right) = match word.strip_suffix(['-', '+']) {
            Some(w) => (w, &word[w.len()..]),
            None => (word, ""),
        };
        let replacement = match word.trim() {
            "generation" => Some("filter ft_generation"),
            "endgeneration" => Some("endfilter"),
            _ => None,
        };
        match replacement {
            Some(r) => {
                found = true;
                let lines = "\n".repeat(inner.matches('\n').count());
                out.push_str(&format!("{{%{left} {r} {lines}{right}%}}"));
                rest = &tag[end + 2..];
            }
            None => {
                out.push_str("{%");
                rest = &tag[2..];
            }
        }
    }
    out.push_str(rest);
    (out, found)
}

/// A buffer that refuses to grow without end.
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LIMIT {
            return Err(io::Error::other("too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
