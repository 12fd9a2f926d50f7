//! Compiles templates with Python's operators and with budget checks: instructions with rules of the engine are
//! replaced by calls of own functions, which spend costs first. Also checks the source before compilation, since
//! parser and compiler recurse with the nesting. The only file that knows the engine's instructions.

use super::operators;
use super::unfold::{python_escapes, unfolded};
use minijinja::machinery::{CodeGenerator, Instruction as I, Instructions, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, Value};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Maximum size of a template in bytes; published templates have at most some tens of thousands.
const LONGEST: usize = 512 << 10;
/// Maximum number of tokens in a tag; a token may add a level to the syntax tree.
const TOKENS: usize = 1024;
/// Maximum number of branches; every branch nests one level deeper.
const BRANCHES: usize = 1000;
/// Maximum length of a name in bytes.
const NAME: usize = 256;

fn refuse(line: usize, why: impl Into<String>) -> (usize, String) {
    (line, why.into())
}

/// Checks length and nesting of a template before compilation.
///
/// # Errors
/// The line, and the exceeded limit.
pub(crate) fn check(source: &str, syntax: &SyntaxConfig) -> Result<(), (usize, String)> {
    if source.len() > LONGEST {
        return Err(refuse(0, format!("it is longer than {} KiB", LONGEST >> 10)));
    }
    let (mut tokens, mut branches) = (0, 0);
    for token in tokenize(source, false, syntax.clone()) {
        // the parser reports invalid tokens with a better message
        let Ok((token, span)) = token else { return Ok(()) };
        let line = span.start_line as usize;
        match token {
            Token::TemplateData(_) => continue,
            Token::VariableStart | Token::BlockStart => tokens = 0,
            Token::Ident(name) if name.len() > NAME => return Err(refuse(line, "a name is too long")),
            Token::Ident("elif" | "else") => branches += 1,
            _ => {}
        }
        tokens += 1;
        if tokens > TOKENS {
            return Err(refuse(line, format!("a tag has more than {TOKENS} words and signs")));
        }
        if branches > BRANCHES {
            return Err(refuse(line, format!("it has more than {BRANCHES} branches")));
        }
    }
    Ok(())
}

/// Names in tags that are no variables.
const WORDS: &str = "and block break call continue defined do elif else endblock endcall endfilter endfor endif \
    endmacro endset endwith False false filter for if in is loop macro None none not or recursive set True true with";

/// Possible variables in the tags of a template, including the template's own: not names of attributes, filters, tests
/// and functions. Stops at the first error, because the tokenizer repeats it without end.
pub(super) fn names(source: &str, syntax: &SyntaxConfig) -> BTreeSet<String> {
    let mut tokens = tokenize(source, false, syntax.clone()).map_while(Result::ok).map(|(t, _)| t).peekable();
    let (mut names, mut before) = (BTreeSet::new(), None);
    while let Some(token) = tokens.next() {
        if let Token::Ident(name) = token
            && !matches!(before, Some(Token::Dot | Token::Pipe | Token::Ident("is" | "filter")))
            && !matches!(tokens.peek(), Some(Token::ParenOpen))
            && !WORDS.split(' ').any(|word| word == name)
        {
            names.insert(name.to_string());
        }
        before = Some(token);
    }
    names
}

/// Reason for refusing a template.
pub(crate) enum Refused {
    /// A syntax error.
    Text(Error),
    /// Line and description of an unsupported construct.
    Unbounded(usize, String),
}

/// Compiles a template with budget checks; registers the called methods in `env`.
///
/// # Errors
/// Syntax errors, and constructs that cannot be bounded.
pub(super) fn compile(env: &mut Environment<'static>, source: &str) -> Result<Guarded, Refused> {
    let source = &python_escapes(source, env.syntax());
    let tree = parse(source, "template", env.syntax().clone()).map_err(Refused::Text)?;
    // templates are compiled once and live as long as the process
    let source = unfolded(source, &tree).map_err(|(line, why)| Refused::Unbounded(line, why))?;
    let source: &'static str = Box::leak(source.into_boxed_str());
    let tree = parse(source, "template", env.syntax().clone()).map_err(Refused::Text)?;
    let mut generator = CodeGenerator::new("template", source);
    generator.compile_stmt(&tree);
    let (main, others) = generator.finish();
    let unbounded = |(line, why)| Refused::Unbounded(line, why);
    let mut blocks = BTreeMap::new();
    for (name, instructions) in &others {
        blocks.insert(*name, rewrite(env, instructions).map_err(unbounded)?);
    }
    Ok(Guarded { instructions: rewrite(env, &main).map_err(unbounded)?, blocks })
}

/// The instructions of a template and of the blocks in it.
pub(super) struct Guarded {
    pub instructions: Instructions<'static>,
    pub blocks: BTreeMap<&'static str, Instructions<'static>>,
}

/// The target of a jump, if the instruction is one; mutable for a mutable instruction.
macro_rules! target {
    ($i:expr) => {
        match $i {
            I::Iterate(t)
            | I::Jump(t)
            | I::JumpIfFalse(t)
            | I::JumpIfFalseOrPop(t)
            | I::JumpIfTrueOrPop(t)
            | I::BuildMacro(_, t, _) => Some(t),
            _ => None,
        }
    };
}

fn rewrite(
    env: &mut Environment<'static>,
    old: &Instructions<'static>,
) -> Result<Instructions<'static>, (usize, String)> {
    let all: Vec<&I<'static>> = (0..).map_while(|i| old.get(i)).collect();
    let mut targets = vec![false; all.len() + 1];
    for i in &all {
        if let Some(t) = target!(i) {
            targets[(*t as usize).min(all.len())] = true;
        }
    }
    let mut out: Vec<(I<'static>, usize)> = Vec::with_capacity(all.len() * 2);
    // new offset of every old instruction, including inserted checks
    let mut at = Vec::with_capacity(all.len() + 1);
    let (mut filters, mut bodies) = (Filters::new(&all), Bodies::new(&all));
    for (n, i) in all.iter().enumerate() {
        at.push(out.len() as u32);
        out.extend(bodies.left(i).into_iter().map(|new| (new, n)));
        bodies.pass(i);
        if matches!(i, I::GetClosure) {
            let names = read_in_macro(&all, n).into_iter();
            let enclosed = names.flat_map(|name| filters.before("ft_closure", I::Enclose(name)));
            out.extend(enclosed.map(|new| (new, n)));
        }
        let constant = match n.checked_sub(1).map(|b| all[b]) {
            Some(I::LoadConst(v)) if !targets[n] => Some(v),
            _ => None,
        };
        for new in replaced(env, &mut filters, i, constant).map_err(|why| (line(old, n), why))? {
            out.push((new, n));
        }
    }
    at.push(out.len() as u32);
    let mut new = Instructions::new(old.name(), old.source());
    for (mut i, n) in out {
        if let Some(t) = target!(&mut i) {
            *t = at[(*t as usize).min(all.len())];
        }
        match (old.get_span(n as u32), old.get_line(n as u32)) {
            (Some(span), _) => new.add_with_span(i, span),
            (None, Some(line)) => new.add_with_line(i, line as u16),
            (None, None) => new.add(i),
        };
    }
    Ok(new)
}

/// The names that a macro reads; `n` is the place of its closure, between body and `BuildMacro`. The engine's own list
/// lacks names also set by the macro, and names in the arguments of a `filter` block.
fn read_in_macro(all: &[&I<'static>], n: usize) -> BTreeSet<&'static str> {
    let Some(I::BuildMacro(_, body, _)) = all.get(n + 2) else { return BTreeSet::new() };
    let name = |i: &&I<'static>| match i {
        I::Lookup(name) | I::CallFunction(name, _) => Some(*name),
        _ => None,
    };
    let names = all.get(*body as usize..n).into_iter().flatten().filter_map(name);
    // a parameter of every macro that reads it
    names.filter(|name| *name != "caller").collect()
}

fn line(old: &Instructions<'static>, n: usize) -> usize {
    old.get_line(n as u32).unwrap_or(0)
}

/// Bodies with variables of their own: of `with`, and those with captured text (`filter`, `set`).
struct Bodies {
    /// Number of open bodies before each instruction.
    depths: Vec<usize>,
    /// The open bodies, outer ones first: whether the text is captured.
    open: Vec<bool>,
}

impl Bodies {
    fn new(all: &[&I<'_>]) -> Self {
        let mut this = Self { depths: Vec::with_capacity(all.len()), open: Vec::new() };
        for i in all {
            this.depths.push(this.open.len());
            this.pass(i);
        }
        this.open.clear();
        this
    }

    fn pass(&mut self, i: &I<'_>) {
        match i {
            I::BeginCapture(_) => self.open.push(true),
            I::PushWith => self.open.push(false),
            I::EndCapture | I::PopFrame => {
                self.open.pop();
            }
            _ => {}
        }
    }

    /// Instructions before a `break` or `continue`: they close the bodies between it and its loop.
    fn left(&self, i: &I<'_>) -> Vec<I<'static>> {
        let I::Jump(to) = i else { return Vec::new() };
        let kept = self.depths.get(*to as usize).copied().unwrap_or(0);
        let close = |captured: &bool| match captured {
            true => vec![I::PopFrame, I::EndCapture, I::DiscardTop],
            false => vec![I::PopFrame],
        };
        self.open.iter().skip(kept).rev().flat_map(close).collect()
    }
}

/// Cache slots for filter lookups during rendering.
struct Filters {
    known: HashMap<&'static str, u8>,
    next: u8,
}

impl Filters {
    /// Number of slots in the engine.
    const MOST: u8 = 50;

    fn new(all: &[&I<'static>]) -> Self {
        let used = all.iter().filter_map(|i| match i {
            I::ApplyFilter(_, _, id) if *id < Self::MOST => Some(id + 1),
            _ => None,
        });
        Self { known: HashMap::new(), next: used.max().unwrap_or(0) }
    }

    fn call(&mut self, name: &'static str, arguments: usize) -> I<'static> {
        self.filter(name, u16::try_from(arguments).ok())
    }

    /// An instruction behind a check by a filter.
    fn before(&mut self, check: &'static str, i: I<'static>) -> Vec<I<'static>> {
        vec![I::LoadConst(Value::from(())), self.call(check, 1), I::DiscardTop, i]
    }

    /// A filter; without a number of arguments it takes the number from the stack.
    fn filter(&mut self, name: &'static str, arguments: Option<u16>) -> I<'static> {
        let next = &mut self.next;
        let id = *self.known.entry(name).or_insert_with(|| {
            let id = *next;
            *next = next.saturating_add(1);
            if id < Self::MOST { id } else { u8::MAX }
        });
        I::ApplyFilter(name, arguments, id)
    }
}

/// The replacement of an instruction. `constant` is the constant pushed directly before, if any.
fn replaced(
    env: &mut Environment<'static>,
    filters: &mut Filters,
    i: &I<'static>,
    constant: Option<&Value>,
) -> Result<Vec<I<'static>>, String> {
    // comparison with a short text constant is cheap, and the engine's rule is Python's
    let small = constant.is_some_and(|c| c.as_str().is_some_and(|s| s.len() <= NAME));
    let f = filters;
    if let Some((name, arguments)) = operator(i).filter(|_| !(small && matches!(i, I::Eq | I::Ne))) {
        return Ok(vec![f.call(name, arguments)]);
    }
    Ok(match i {
        I::Include(_) | I::LoadBlocks | I::ExportLocals => {
            return Err(
                "include, import and extends name other templates, and a chat template has none".into()
            );
        }
        // the recursion of a loop is bounded by its one argument
        I::CallFunction("loop", None) => {
            return Err("loop(*list) is not supported: loop(items) takes one argument".into());
        }
        // a, b becomes b, a op b; the engine does not export the type of `op`
        I::CompareAndPreserve(op) => {
            vec![I::LoadConst(Value::from(format!("{op:?}"))), f.call("ft_compare", 3), I::UnpackList(2)]
        }
        I::GetAttr(name) => vec![I::LoadConst(Value::from(*name)), f.call("ft_attr", 2)],
        I::BuildList(Some(n)) => vec![f.call("ft_list", *n)],
        I::BuildTuple(Some(n)) => vec![f.call("ft_tuple", *n)],
        I::BuildMap(n) => vec![f.call("ft_map", 2 * n)],
        I::SetAttr(name) => vec![I::Swap, f.call("ft_data", 1), I::Swap, I::SetAttr(name)],
        I::PushLoop(flags) => vec![f.call("ft_iter", 1), I::PushLoop(*flags)],
        // a recursion enters the loop behind that check
        I::FastRecurse => vec![f.call("ft_iter", 1), I::FastRecurse],
        I::CallFunction("loop", Some(1)) => vec![f.call("ft_iter", 1), I::CallFunction("loop", Some(1))],
        I::UnpackList(n) => vec![f.call("ft_unpack", 1), I::UnpackList(*n)],
        // positional and keyword arguments with *list and **map: the engine pushes their number, and the
        // call takes it from there
        I::UnpackLists(n) => vec![f.call("ft_arguments", *n), I::UnpackLists(1)],
        I::MergeKwargs(n) => vec![f.call("ft_keywords", *n)],
        I::Iterate(to) => f.before("ft_tick", I::Iterate(*to)),
        I::CallFunction(name, n) => f.before("ft_tick", I::CallFunction(name, *n)),
        // see `read_in_macro`
        I::Enclose(_) => Vec::new(),
        I::CallMethod(name, n) => vec![f.filter(operators::add_method(env, name), *n)],
        I::EmitRaw(text) => vec![I::LoadConst(Value::from(*text)), I::Emit],
        // variables set in a captured body end with it, unlike in the engine
        I::BeginCapture(mode) => vec![I::BeginCapture(*mode), I::PushWith],
        I::EndCapture => vec![I::PopFrame, I::EndCapture],
        other => vec![copy(other)?],
    })
}

/// The filter in place of an operator, and the number of operands.
fn operator(i: &I<'_>) -> Option<(&'static str, usize)> {
    Some(match i {
        I::Add => ("ft_add", 2),
        I::Sub => ("ft_sub", 2),
        I::Mul => ("ft_mul", 2),
        I::Div => ("ft_div", 2),
        I::IntDiv => ("ft_floor", 2),
        I::Rem => ("ft_rem", 2),
        I::Pow => ("ft_pow", 2),
        I::Neg => ("ft_neg", 1),
        I::StringConcat => ("ft_concat", 2),
        I::Slice => ("ft_slice", 4),
        I::Eq => ("ft_eq", 2),
        I::Ne => ("ft_ne", 2),
        I::Lt => ("ft_lt", 2),
        I::Lte => ("ft_lte", 2),
        I::Gt => ("ft_gt", 2),
        I::Gte => ("ft_gte", 2),
        I::In => ("ft_in", 2),
        I::GetItem => ("ft_item", 2),
        _ => return None,
    })
}

/// Copies an instruction; the type is not `Clone`.
fn copy(i: &I<'static>) -> Result<I<'static>, String> {
    Ok(match i {
        I::Swap => I::Swap,
        I::Emit => I::Emit,
        I::StoreLocal(n) => I::StoreLocal(n),
        I::Lookup(n) => I::Lookup(n),
        I::LoadConst(v) => I::LoadConst(v.clone()),
        I::BuildKwargs(n) => I::BuildKwargs(*n),
        // a loop with a condition: collects existing items pushed one by one
        I::BuildList(None) => I::BuildList(None),
        I::Eq => I::Eq,
        I::Ne => I::Ne,
        I::Not => I::Not,
        I::ApplyFilter(name, n, id) => I::ApplyFilter(name, *n, *id),
        I::PerformTest(name, n, id) => I::PerformTest(name, *n, *id),
        I::PushWith => I::PushWith,
        I::PushDidNotIterate => I::PushDidNotIterate,
        I::PopFrame => I::PopFrame,
        I::PopLoopFrame => I::PopLoopFrame,
        I::Jump(t) => I::Jump(*t),
        I::JumpIfFalse(t) => I::JumpIfFalse(*t),
        I::JumpIfFalseOrPop(t) => I::JumpIfFalseOrPop(*t),
        I::JumpIfTrueOrPop(t) => I::JumpIfTrueOrPop(*t),
        I::PushAutoEscape => I::PushAutoEscape,
        I::PopAutoEscape => I::PopAutoEscape,
        I::CallObject(n) => I::CallObject(*n),
        I::DupTop => I::DupTop,
        I::DiscardTop => I::DiscardTop,
        I::FastSuper => I::FastSuper,
        I::CallBlock(n) => I::CallBlock(n),
        I::BuildMacro(name, t, flags) => I::BuildMacro(name, *t, *flags),
        I::Return => I::Return,
        I::IsUndefined => I::IsUndefined,
        I::GetClosure => I::GetClosure,
        other => return Err(format!("the instruction {other:?} is not built yet")),
    })
}
