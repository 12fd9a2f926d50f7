//! Compiles and renders chat templates.

use super::bounds::{self, spend};
use super::guard::{self, Guarded};
use super::{checks, filters, functions, operators};
use crate::error::Error;
use ft_base::memory::on_stack;
use ft_base::terminal::panics::caught;
use minijinja::machinery::{eval, make_string_output};
use minijinja::value::{Enumerator, Object, Value};
use minijinja::{AutoEscape, Environment, ErrorKind, syntax::SyntaxConfig};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// Maximum number of instructions per rendering: well under a second, and far more than the longest
/// conversation needs.
const FUEL: u64 = 8_000_000;
/// Number of renderings of a template that may exceed a budget before further attempts fail immediately.
const TRIES: u32 = 3;
/// Length of the byte sequences compared with the template source.
pub(crate) const WINDOW: usize = 8;
/// Stack size for compilation: one tree level per token of the longest tag.
const STACK: usize = 16 << 20;

/// Delimiters of the text marked by `{% generation %}`. Unicode noncharacters have no use in text and no
/// tokens; rows with noncharacters are refused.
const GENERATION: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// Variables of a rendering, in addition to the messages.
pub(crate) type Variables = Arc<BTreeMap<String, Value>>;

/// Name lookup for a template.
#[derive(Debug)]
struct Context {
    variables: Variables,
    messages: Value,
    tools: Value,
    add_generation_prompt: bool,
}

impl Context {
    const OWN: [&str; 4] = ["messages", "tools", "add_generation_prompt", "documents"];
}

impl Object for Context {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let variable = |name: &str| self.variables.get(name).cloned();
        match key.as_str()? {
            "messages" => Some(self.messages.clone()),
            "tools" => Some(self.tools.clone()),
            "add_generation_prompt" => Some(Value::from(self.add_generation_prompt)),
            "documents" => variable("documents").or(Some(Value::from(()))),
            name => variable(name),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let others = self.variables.keys().map(String::as_str).filter(|k| !Self::OWN.contains(k));
        Enumerator::Values(Self::OWN.into_iter().chain(others).map(Value::from).collect())
    }
}

/// A compiled chat template.
pub(crate) struct Template {
    env: Environment<'static>,
    origin: String,
    default: Option<Guarded>,
    tool_use: Option<Guarded>,
    has_generation: bool,
    /// Template sources, and the sorted set of all byte windows in them.
    sources: Vec<String>,
    windows: OnceLock<Vec<[u8; WINDOW]>>,
    /// Names that may be variables.
    names: BTreeSet<String>,
    /// Number of renderings over budget, and the first such error.
    spent: AtomicU32,
    last: OnceLock<(usize, String)>,
}

impl Template {
    /// Compiles `default` and `tool_use`, the template preferred by transformers for conversations with
    /// tools.
    pub fn new(origin: &str, default: &str, tool_use: Option<&str>) -> Result<Self, Error> {
        let mut this = Self {
            env: environment(),
            origin: origin.to_string(),
            default: None,
            tool_use: None,
            has_generation: false,
            sources: Vec::new(),
            windows: OnceLock::new(),
            names: BTreeSet::new(),
            spent: AtomicU32::new(0),
            last: OnceLock::new(),
        };
        this.default = Some(this.compile(default)?);
        this.tool_use = tool_use.map(|source| this.compile(source)).transpose()?;
        Ok(this)
    }

    fn compile(&mut self, source: &str) -> Result<Guarded, Error> {
        let (source, generation) = generation_blocks(source);
        self.has_generation |= generation;
        guard::check(&source, self.env.syntax()).map_err(|(line, why)| self.fail(line, why))?;
        let names = guard::names(&source, self.env.syntax());
        self.names.extend(names.into_iter().filter(|name| !Self::sets(name)));
        self.sources.push(source.clone());
        let mut env = self.env.clone();
        // a separate thread with enough stack for deeply nested templates
        let compiled = on_stack(STACK, || {
            let compiled = caught(|| guard::compile(&mut env, &source));
            let compiled =
                compiled.map_err(|panic| self.fail(0, format!("it cannot be compiled: {panic}")))?;
            compiled.map_err(|e| match e {
                guard::Refused::Text(e) => self.error(&e),
                guard::Refused::Unbounded(line, why) => self.fail(line, why),
            })
        });
        let compiled = compiled
            .map_err(|e| self.fail(0, format!("no thread to compile it: {e}")))?
            .unwrap_or_else(|_| Err(self.fail(0, "a panic while it was compiled")))?;
        self.env = env;
        Ok(compiled)
    }

    /// Whether the template marks the assistant's text with `{% generation %}`.
    pub fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Whether the template source contains these bytes.
    pub fn spells(&self, bytes: &[u8]) -> bool {
        let windows = self.windows.get_or_init(|| {
            let mut all: Vec<[u8; WINDOW]> =
                self.sources.iter().flat_map(|s| s.as_bytes().array_windows().copied()).collect();
            all.sort_unstable();
            all.dedup();
            all
        });
        windows.binary_search_by(|w| w.as_slice().cmp(bytes)).is_ok()
    }

    /// Whether every rendering sets this variable itself; documents are given, if any.
    pub fn sets(name: &str) -> bool {
        name != "documents" && Context::OWN.contains(&name)
    }

    /// Names of possible variables, without the variables of every rendering. A variable of any other name has no
    /// effect.
    pub fn names(&self) -> &BTreeSet<String> {
        &self.names
    }

    /// Renders a conversation. Also returns the byte ranges marked by `{% generation %}`.
    pub fn render(
        &self,
        messages: &[Value],
        tools: &Value,
        add_generation_prompt: bool,
        variables: &Variables,
    ) -> Result<(String, Vec<Range<usize>>), Error> {
        if self.spent.load(Relaxed) >= TRIES
            && let Some((line, message)) = self.last.get()
        {
            return Err(self.fail(*line, message));
        }
        #[cfg(test)]
        RENDERINGS.set(RENDERINGS.get() + 1);
        let messages = Value::from(messages.to_vec());
        bounds::begin(&[&messages, tools]);
        let variables = variables.clone();
        let context = Context { variables, messages, tools: tools.clone(), add_generation_prompt };
        let code = self.tool_use.as_ref().filter(|_| !tools.is_none()).or(self.default.as_ref());
        let Some(code) = code else { return Err(self.fail(0, "it was not compiled")) };
        let mut text = String::new();
        let mut out = make_string_output(&mut text);
        let context = Value::from_object(context);
        let done = caught(|| {
            eval(&self.env, &code.instructions, context, &code.blocks, &mut out, AutoEscape::None).map(|_| ())
        });
        match done {
            Err(panic) => return Err(self.fail(0, format!("it cannot be rendered: {panic}"))),
            Ok(Err(e)) => return Err(self.error(&e)),
            Ok(Ok(())) if bounds::stopped() => {
                return Err(self.error(&minijinja::Error::from(ErrorKind::OutOfFuel)));
            }
            Ok(Ok(())) => {}
        }
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

    /// An error at a line of the template; 0 if unknown.
    pub fn fail(&self, line: usize, message: impl Into<String>) -> Error {
        Error::Template { origin: self.origin.clone(), line, message: message.into() }
    }

    /// Converts an error of the engine, using the innermost cause.
    fn error(&self, e: &minijinja::Error) -> Error {
        let mut e = e;
        while let Some(inner) =
            std::error::Error::source(e).and_then(|s| s.downcast_ref::<minijinja::Error>())
        {
            e = inner;
        }
        let message = match (e.kind(), e.detail()) {
            (_, Some(detail)) => detail.to_string(),
            (ErrorKind::OutOfFuel, _) => "it does not come to an end".to_string(),
            (kind, None) => kind.to_string(),
        };
        let line = e.line().unwrap_or(0);
        if e.kind() == ErrorKind::OutOfFuel {
            self.spent.fetch_add(1, Relaxed);
            let _ = self.last.set((line, message.clone()));
        }
        self.fail(line, message)
    }
}

/// An environment with the functions, filters and white-space rules of transformers.
fn environment() -> Environment<'static> {
    let mut env = Environment::empty();
    filters::add(&mut env);
    checks::add(&mut env);
    functions::add(&mut env);
    operators::add(&mut env);
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.unwrap_or_default());
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(100);
    env.add_filter("ft_generation", |body: String| {
        spend(body.len())?;
        Ok::<_, minijinja::Error>(format!("{}{body}{}", GENERATION[0], GENERATION[1]))
    });
    env
}

/// Rewrites `{% generation %}` blocks as filter blocks that delimit the body; white-space control, line
/// numbers and scoping are preserved. Also returns whether any block was found.
fn generation_blocks(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut found = false;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag[2..].find("%}").map(|end| end + 2) else { break };
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

#[cfg(test)]
thread_local! {
    static RENDERINGS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Calls `f`, and counts renderings.
#[cfg(test)]
pub(crate) fn renderings<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = RENDERINGS.get();
    (f(), RENDERINGS.get() - before)
}
