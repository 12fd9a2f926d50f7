//! Keeps the engine from computing constants with its own rules (`-7 // 2`, `1e-7 ~ ''`): one literal of every such
//! expression goes through a filter that returns it unchanged. Also refuses constructs with another meaning in the
//! engine than in Jinja2.

use minijinja::machinery::ast::{CallArg, Expr, Macro, Stmt, UnaryOpKind};
use minijinja::machinery::{Span, Token, tokenize};
use minijinja::syntax::SyntaxConfig;

/// The source, with a filter behind a literal of each constant expression.
///
/// # Errors
/// Line and description of the first refused construct: a call with arguments in an order refused by Jinja2, values of
/// `with` and defaults of macros with variables of the same tag.
pub(super) fn unfolded(source: &str, tree: &Stmt<'_>) -> Result<String, (usize, String)> {
    let mut found = Literals { spans: Vec::new(), names: Vec::new(), refused: None };
    found.statement(tree);
    if let Some(refused) = found.refused {
        return Err(refused);
    }
    let mut spans = found.spans;
    spans.sort_unstable();
    spans.dedup();
    let mut out = String::with_capacity(source.len());
    let mut from = 0;
    for (start, end) in spans {
        let (Some(before), Some(literal)) = (source.get(from..start), source.get(start..end)) else {
            continue;
        };
        out.push_str(before);
        out.push_str(&format!("({literal}|ft_same)"));
        from = end;
    }
    Ok(out + source.get(from..).unwrap_or_default())
}

/// Byte ranges of the literals to hide, the variables read so far, and the first refused construct.
struct Literals<'s> {
    spans: Vec<(usize, usize)>,
    names: Vec<&'s str>,
    refused: Option<(usize, String)>,
}

impl<'s> Literals<'s> {
    fn statements(&mut self, all: &[Stmt<'s>]) {
        all.iter().for_each(|s| self.statement(s));
    }

    fn statement(&mut self, statement: &Stmt<'s>) {
        match statement {
            Stmt::Template(t) => self.statements(&t.children),
            Stmt::EmitExpr(e) => self.expr(&e.expr),
            Stmt::ForLoop(f) => {
                self.expr(&f.iter);
                self.option(&f.filter_expr);
                self.statements(&f.body);
                self.statements(&f.else_body);
            }
            Stmt::IfCond(i) => {
                self.expr(&i.expr);
                self.statements(&i.true_body);
                self.statements(&i.false_body);
            }
            Stmt::WithBlock(w) => {
                let mut set: Vec<&str> = Vec::new();
                for (target, value) in &w.assignments {
                    self.expr_without(&set, value, |name| {
                        format!(
                            "a value in {{% with %}} reads {name:?}, which the same tag sets before: not supported\n  \
                             hint: in Jinja2 it is the outer {name:?}; copy that in a {{% set %}} before the tag"
                        )
                    });
                    set.extend(self.names_in(target));
                }
                self.statements(&w.body);
            }
            Stmt::Set(s) => self.expr(&s.expr),
            Stmt::SetBlock(s) => {
                self.option(&s.filter);
                self.statements(&s.body);
            }
            Stmt::AutoEscape(a) => self.statements(&a.body),
            Stmt::FilterBlock(f) => {
                self.expr(&f.filter);
                self.statements(&f.body);
            }
            Stmt::Block(b) => self.statements(&b.body),
            Stmt::Macro(m) => self.declaration(m),
            Stmt::CallBlock(c) => {
                self.arguments(&c.call.args);
                self.declaration(&c.macro_decl);
            }
            Stmt::Do(d) => self.arguments(&d.call.args),
            _ => {}
        }
    }

    /// The engine computes defaults before it stores the parameters.
    fn declaration(&mut self, m: &Macro<'s>) {
        let parameters: Vec<&str> = m.args.iter().flat_map(|a| self.names_in(a)).collect();
        for (own, default) in parameters.iter().rev().zip(m.defaults.iter().rev()) {
            self.expr_without(&parameters, default, |name| {
                format!(
                    "the default of the parameter {own:?} names the parameter {name:?}: not supported\n  \
                     hint: leave the default out, and begin the body with \
                     {{% set {own} = {name} if {own} is undefined else {own} %}}"
                )
            });
        }
        self.statements(&m.body);
    }

    /// Visits an expression; refuses it if it reads one of `names`.
    fn expr_without(&mut self, names: &[&str], expr: &Expr<'s>, why: impl Fn(&str) -> String) {
        if let Some(name) = self.names_in(expr).iter().find(|name| names.contains(name)) {
            self.refused.get_or_insert((expr.span().start_line as usize, why(name)));
        }
    }

    /// Visits an expression; returns its variables.
    fn names_in(&mut self, expr: &Expr<'s>) -> Vec<&'s str> {
        let before = self.names.len();
        self.expr(expr);
        self.names.split_off(before)
    }

    fn option(&mut self, expr: &Option<Expr<'s>>) {
        expr.iter().for_each(|e| self.expr(e));
    }

    fn exprs(&mut self, all: &[Expr<'s>]) {
        all.iter().for_each(|e| self.expr(e));
    }

    fn arguments(&mut self, args: &[CallArg<'s>]) {
        let (mut list, mut map) = (false, false);
        for arg in args {
            let (ordered, e) = match arg {
                CallArg::Pos(e) => (!list && !map, e),
                CallArg::Kwarg(_, e) => (!map, e),
                CallArg::PosSplat(e) => (!std::mem::replace(&mut list, true) && !map, e),
                CallArg::KwargSplat(e) => (!std::mem::replace(&mut map, true), e),
            };
            if !ordered {
                let why =
                    "arguments of a call are in this order: values, one *list, names = values, one **map";
                self.refused.get_or_insert((e.span().start_line as usize, why.into()));
            }
            self.expr(e);
        }
    }

    fn expr(&mut self, expr: &Expr<'s>) {
        let before = self.spans.len();
        match expr {
            Expr::Var(v) => self.names.push(v.id),
            Expr::Const(_) => {}
            Expr::Slice(s) => {
                self.expr(&s.expr);
                [&s.start, &s.stop, &s.step].into_iter().for_each(|e| self.option(e));
            }
            Expr::UnaryOp(u) => {
                self.expr(&u.expr);
                let number = matches!(&u.expr, Expr::Const(c) if c.value.is_number());
                if matches!(u.op, UnaryOpKind::Neg) && !number {
                    self.hide(expr, before);
                }
            }
            Expr::BinOp(b) => {
                self.expr(&b.left);
                self.expr(&b.right);
                self.hide(expr, before);
            }
            Expr::Compare(c) => {
                self.expr(&c.expr);
                c.ops.iter().for_each(|op| self.expr(&op.expr));
                self.hide(expr, before);
            }
            Expr::IfExpr(i) => {
                self.expr(&i.test_expr);
                self.expr(&i.true_expr);
                self.option(&i.false_expr);
            }
            Expr::Filter(f) => {
                self.option(&f.expr);
                self.arguments(&f.args);
            }
            Expr::Test(t) => {
                self.expr(&t.expr);
                self.arguments(&t.args);
            }
            Expr::GetAttr(g) => self.expr(&g.expr),
            Expr::GetItem(g) => {
                self.expr(&g.expr);
                self.expr(&g.subscript_expr);
            }
            Expr::Call(c) => {
                self.expr(&c.expr);
                self.arguments(&c.args);
            }
            Expr::List(l) => self.exprs(&l.items),
            Expr::Tuple(t) => self.exprs(&t.items),
            Expr::Map(m) => {
                self.exprs(&m.keys);
                self.exprs(&m.values);
            }
        }
    }

    /// Hides a literal of a constant expression, unless one inside it is hidden already.
    fn hide(&mut self, expr: &Expr<'_>, before: usize) {
        if self.spans.len() == before
            && expr.as_const().is_some()
            && let Some(literal) = literal(expr)
        {
            self.spans.push(literal);
        }
    }
}

/// The byte range of a literal in a constant expression.
fn literal(expr: &Expr<'_>) -> Option<(usize, usize)> {
    match expr {
        Expr::Const(c) => Some(range(c.span())),
        Expr::UnaryOp(u) => literal(&u.expr),
        Expr::BinOp(b) => literal(&b.left).or_else(|| literal(&b.right)),
        Expr::Compare(c) => literal(&c.expr).or_else(|| c.ops.iter().find_map(|op| literal(&op.expr))),
        Expr::List(l) => l.items.iter().find_map(literal).or(Some(range(l.span()))),
        Expr::Tuple(t) => t.items.iter().find_map(literal),
        Expr::Map(m) => m.keys.iter().chain(&m.values).find_map(literal).or(Some(range(m.span()))),
        _ => None,
    }
}

fn range(span: Span) -> (usize, usize) {
    (span.start_offset as usize, span.end_offset as usize)
}

/// Rewrites escapes in strings with different meanings in Python and in the engine.
pub(super) fn python_escapes(source: &str, syntax: &SyntaxConfig) -> String {
    let (mut out, mut from) = (String::with_capacity(source.len()), 0);
    for (token, span) in tokenize(source, false, syntax.clone()).map_while(Result::ok) {
        let (start, end) = range(span);
        let (Token::Str(_) | Token::String(_), Some(before), Some(string)) =
            (token, source.get(from..start), source.get(start..end))
        else {
            continue;
        };
        if string.contains('\\') {
            out.push_str(before);
            out.push_str(&escapes(string));
            from = end;
        }
    }
    out + source.get(from..).unwrap_or_default()
}

fn escapes(string: &str) -> String {
    let mut out = String::new();
    let mut rest = string;
    while let Some((before, escape)) = rest.split_once('\\') {
        out.push_str(before);
        let mut chars = escape.chars();
        let letter = chars.next();
        rest = chars.as_str();
        let long = || rest.get(..8).and_then(|digits| char::from_u32(u32::from_str_radix(digits, 16).ok()?));
        match letter {
            Some('a') => out.push_str("\\x07"),
            Some('v') => out.push_str("\\x0b"),
            Some('/') => out.push_str("\\\\/"),
            Some('\n') => {}
            Some('U') => match long() {
                Some(c) => {
                    out.push(c);
                    rest = &rest[8..];
                }
                None => out.push_str("\\U"),
            },
            other => {
                out.push('\\');
                out.extend(other);
            }
        }
    }
    out + rest
}
