//! Compiles and renders chat templates.

use super::bounds::{self, spend};
use super::guard::{self, Guarded};
use super::{checks, filters, functions, operators};
use crate::error::Error;
use ft_base::memory::on_stack;
use ft_base::terminal::panics::caught;
use minijinja::machinery::{Token, eval, make_string_output, tokenize};
use minijinja::value::{Enumerator, Object, Value};
use minijinja::{AutoEscape, Environment, ErrorKind, syntax::SyntaxConfig};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Maximum number of instructions per rendering: well under a second, and far more than the longest
/// conversation needs.
const FUEL: u64 = 8_000_000;
/// Maximum number of nested frames of a rendering (a macro's call counts as six), on the thread's own stack and on a
/// stack of [`STACK`] bytes; the second is the engine's maximum.
const LEVELS: (usize, usize) = (100, 500);
/// The engine's error for more frames.
const TOO_DEEP: &str = "recursion limit exceeded";
/// Stack size for compilation (one tree level per token of the longest tag) and for deep renderings.
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

/// The code of one template.
struct Compiled {
    code: Guarded,
    /// Whether it marks the assistant's text with `{% generation %}`.
    has_generation: bool,
    /// The first error over budget, or none if a short conversation ends; absent before.
    endless: OnceLock<Option<(usize, String)>>,
}

/// A compiled chat template.
pub(crate) struct Template {
    env: Environment<'static>,
    origin: String,
    default: Option<Compiled>,
    tool_use: Option<Compiled>,
    sources: Vec<String>,
    /// Names that may be variables.
    names: BTreeSet<String>,
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
            sources: Vec::new(),
            names: BTreeSet::new(),
        };
        this.default = Some(this.compile(default)?);
        this.tool_use = tool_use.map(|source| this.compile(source)).transpose()?;
        Ok(this)
    }

    fn compile(&mut self, source: &str) -> Result<Compiled, Error> {
        // as Jinja2 reads newlines
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        guard::check(&source, self.env.syntax()).map_err(|(line, why)| self.fail(line, why))?;
        let (source, has_generation) = engine_tags(&source, self.env.syntax());
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
        Ok(Compiled { code: compiled, has_generation, endless: OnceLock::new() })
    }

    /// The template for conversations with these tools.
    fn chosen(&self, tools: &Value) -> Option<&Compiled> {
        self.tool_use.as_ref().filter(|_| !tools.is_none()).or(self.default.as_ref())
    }

    /// Whether the template for conversations with these tools marks the assistant's text with `{% generation %}`.
    pub fn has_generation(&self, tools: &Value) -> bool {
        self.chosen(tools).is_some_and(|t| t.has_generation)
    }

    /// Whether the template source contains this text.
    pub fn spells(&self, text: &str) -> bool {
        self.sources.iter().any(|s| s.contains(text))
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
        let Some(template) = self.chosen(tools) else { return Err(self.fail(0, "it was not compiled")) };
        if let Some(Some((line, message))) = template.endless.get() {
            return Err(self.fail(*line, message));
        }
        #[cfg(test)]
        RENDERINGS.set(RENDERINGS.get() + 1);
        let context = Arc::new(Context {
            variables: variables.clone(),
            messages: Value::from(messages.to_vec()),
            tools: tools.clone(),
            add_generation_prompt,
        });
        let mut text = evaluated(&self.env, &template.code, &context);
        if text.as_ref().is_err_and(|e| innermost(e).detail() == Some(TOO_DEEP)) {
            let mut env = self.env.clone();
            env.set_recursion_limit(LEVELS.1);
            let deep = on_stack(STACK, || evaluated(&env, &template.code, &context));
            let deep = deep.map_err(|e| self.fail(0, format!("no thread to render it: {e}")))?;
            text = deep.map_err(|_| self.fail(0, "a panic while it was rendered"))?;
        }
        let text = text.map_err(|e| {
            let error = self.error(&e);
            if is_over_budget(&e)
                && let Error::Template { line, message, .. } = &error
            {
                let told = || (*line, message.clone());
                template.endless.get_or_init(|| self.is_endless(template, variables).then(told));
            }
            error
        })?;
        if template.has_generation { self.take_out_marks(&text) } else { Ok((text, Vec::new())) }
    }

    /// Whether a short conversation exceeds a budget. The answer is the same for any row and thread.
    fn is_endless(&self, template: &Compiled, variables: &Variables) -> bool {
        let turn = |role: &str| Value::from_pairs([("role", role), ("content", "a")]);
        let context = Context {
            variables: variables.clone(),
            messages: Value::from(vec![turn("user"), turn("assistant")]),
            tools: Value::from(()),
            add_generation_prompt: false,
        };
        evaluated(&self.env, &template.code, &Arc::new(context)).is_err_and(|e| is_over_budget(&e))
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
        let e = innermost(e);
        let message = match (e.kind(), e.detail()) {
            (_, Some(detail)) => detail.to_string(),
            (ErrorKind::OutOfFuel, _) => "it does not come to an end".to_string(),
            (kind, None) => kind.to_string(),
        };
        self.fail(e.line().unwrap_or(0), message)
    }
}

fn innermost(e: &minijinja::Error) -> &minijinja::Error {
    let inner = std::error::Error::source(e).and_then(|s| s.downcast_ref::<minijinja::Error>());
    inner.map_or(e, innermost)
}

fn is_over_budget(e: &minijinja::Error) -> bool {
    innermost(e).kind() == ErrorKind::OutOfFuel
}

/// The text of a conversation, within the budgets.
fn evaluated(
    env: &Environment<'static>,
    code: &Guarded,
    context: &Arc<Context>,
) -> Result<String, minijinja::Error> {
    bounds::begin(&[&context.messages, &context.tools]);
    let mut text = String::new();
    let mut out = make_string_output(&mut text);
    let root = Value::from_dyn_object(context.clone());
    let done =
        caught(|| eval(env, &code.instructions, root, &code.blocks, &mut out, AutoEscape::None).map(|_| ()));
    done.map_err(|panic| {
        minijinja::Error::new(ErrorKind::InvalidOperation, format!("it cannot be rendered: {panic}"))
    })??;
    if bounds::stopped() { Err(ErrorKind::OutOfFuel.into()) } else { Ok(text) }
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
    env.set_recursion_limit(LEVELS.0);
    env.add_filter("ft_generation", |body: String| {
        spend(body.len())?;
        Ok::<_, minijinja::Error>(format!("{}{body}{}", GENERATION[0], GENERATION[1]))
    });
    env
}

/// Rewrites `{% generation %}` blocks as filter blocks around the body, and keeps the newline behind `{% raw %}`, as
/// Jinja2 does. Also returns whether any `{% generation %}` was found.
fn engine_tags(source: &str, syntax: &SyntaxConfig) -> (String, bool) {
    let (mut out, mut from) = (String::with_capacity(source.len()), 0);
    let (mut found, mut opens) = (false, false);
    // comments and raw text have no tags
    for (token, span) in tokenize(source, false, syntax.clone()).map_while(Result::ok) {
        let (start, end) = (span.start_offset as usize, span.end_offset as usize);
        let edit = match token {
            Token::Ident("generation") if opens => Some((start..end, "filter ft_generation")),
            Token::Ident("endgeneration") if opens => Some((start..end, "endfilter")),
            Token::TemplateData(_) if ends_with_raw(&source[..start]) => Some((start - 2..start - 2, "+")),
            _ => None,
        };
        found |= opens && matches!(token, Token::Ident("generation"));
        opens = matches!(token, Token::BlockStart);
        if let Some((range, new)) = edit {
            out.push_str(&source[from..range.start]);
            out.push_str(new);
            from = range.end;
        }
    }
    (out + &source[from..], found)
}

/// Whether a source ends with the tag `{% raw %}`, without a sign for the white space behind the tag.
fn ends_with_raw(source: &str) -> bool {
    let tag = source.strip_suffix("%}").and_then(|s| s.trim_end().strip_suffix("raw"));
    tag.is_some_and(|s| s.trim_end().trim_end_matches(['-', '+']).ends_with("{%"))
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
