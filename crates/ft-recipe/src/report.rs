//! Problems of a recipe as data, and how they look.
//!
//! Each problem keeps the line that it is about, so that it can be shown long after the file was read.
//! Only this file knows the renderer.

use ft_base::error::Place;
use ft_base::terminal::escape;
use annotate_snippets::renderer::DecorStyle;
use annotate_snippets::{AnnotationKind, Level, Origin, Renderer, Snippet};
use std::fmt;
use std::ops::Range;

/// The longest part of a source line that a problem shows, in bytes on each side of the place.
const SHOWN: usize = 120;

/// How many problems are reported at the most: more says nothing more, and takes time.
pub(super) const MOST: usize = 100;

/// A text that problems can point into: the recipe file, or one `KEY=VALUE` of the command line.
#[derive(Clone, Debug)]
pub(super) struct Text {
    /// How messages call it.
    pub name: String,
    /// What it says.
    pub text: String,
    /// Whether it has lines: a `KEY=VALUE` has none.
    pub is_file: bool,
    /// Where each line begins, in bytes.
    lines: Vec<usize>,
}

impl Text {
    /// The recipe file.
    pub fn file(name: String, text: String) -> Self {
        let lines = std::iter::once(0).chain(text.match_indices('\n').map(|(i, _)| i + 1)).collect();
        Self { name, text, is_file: true, lines }
    }

    /// A `KEY=VALUE`.
    pub fn argument(text: &str) -> Self {
        let shown: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        Self { name: format!("command line: {shown}"), text: text.into(), is_file: false, lines: vec![0] }
    }
}

/// A part of one of the texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct At {
    /// Which text: 0 is the file, `i` is override `i - 1`.
    pub text: usize,
    /// Bytes of it.
    pub span: Range<usize>,
}

/// One problem of a recipe.
#[derive(Clone, Debug)]
pub struct Diagnostic {
    /// Where it is.
    pub place: Place,
    /// The dotted path of the key that it is about, where there is one.
    pub key: Option<String>,
    /// What is wrong.
    pub message: String,
    /// What to do next; none, one or several lines.
    pub hints: Vec<String>,
    /// The part of the source line that is shown.
    line: String,
    /// What is underlined in it.
    span: Range<usize>,
    /// Whether it is only a part of the line.
    cut: bool,
    /// Order in the file.
    order: (usize, usize),
}

impl Diagnostic {
    /// A problem at `at`.
    pub(super) fn new(texts: &[Text], at: &At, message: impl Into<String>) -> Self {
        let (place, line, span, cut) = locate(texts, at);
        Self {
            place,
            key: None,
            message: message.into(),
            hints: Vec::new(),
            line,
            span,
            cut,
            order: (at.text, at.span.start),
        }
    }

    /// Names the key.
    pub(super) fn key(mut self, key: &str) -> Self {
        self.key = Some(key.to_string());
        self
    }

    /// Adds a line about what to do next.
    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// The problem with its source line, underline and hints, ending in a line break.
    pub fn render(&self, color: bool) -> String {
        let renderer = if color { Renderer::styled() } else { Renderer::plain() };
        let renderer = renderer.decor_style(DecorStyle::Ascii);
        // what the recipe says is escaped before colours are put around it
        let (message, file, line) = (escape(&self.message), escape(&self.place.file), escape(&self.line));
        let start = escape(&self.line[..self.span.start]).len();
        let span = start..start + escape(&self.line[self.span.clone()]).len();
        let hints: Vec<_> = self.hints.iter().map(|h| escape(h)).collect();
        let title = Level::ERROR.primary_title(message.as_ref());
        let snippet = Snippet::source(line.as_ref())
            .line_start(self.place.line.max(1))
            .annotation(AnnotationKind::Primary.span(span));
        let mut group = if self.place.line == 0 || self.line.is_empty() {
            // An argument of the command line: the place's name holds all of it.
            title.element(origin(&self.place, &file))
        } else if self.cut {
            // The renderer counts the column itself, which it cannot in a part of a line.
            title.element(origin(&self.place, &file)).element(snippet)
        } else {
            title.element(snippet.path(file.as_ref()))
        };
        let hint = Level::HELP.with_name("hint");
        for text in &hints {
            group = group.element(hint.clone().message(text.as_ref()));
        }
        let mut out = renderer.render(&[group]);
        out.push('\n');
        out
    }
}

fn origin<'a>(place: &Place, file: &'a str) -> Origin<'a> {
    let origin = Origin::path(file);
    if place.line > 0 { origin.line(place.line).char_column(place.column) } else { origin }
}

/// The place of `at`, the part of its first line that is shown, what of that is underlined, and whether it
/// is less than the line.
fn locate(texts: &[Text], at: &At) -> (Place, String, Range<usize>, bool) {
    let Some(source) = texts.get(at.text) else {
        return (Place { file: "recipe".into(), line: 0, column: 0 }, String::new(), 0..0, false);
    };
    let text = source.text.as_str();
    let start = floor(text, at.span.start);
    let line = source.lines.partition_point(|begin| *begin <= start).max(1);
    let line_start = source.lines.get(line - 1).copied().unwrap_or(0);
    let line_end = text[start..].find('\n').map_or(text.len(), |i| start + i);
    let end = floor(text, at.span.end).clamp(start, line_end);
    // A very long line is shown around the place only.
    let from = floor(text, start.saturating_sub(SHOWN).max(line_start));
    let to = floor(text, (start + SHOWN).min(line_end));
    let shown = text[from..to].trim_end_matches('\r');
    let span = (start - from).min(shown.len())..(end - from).min(shown.len());
    let place = if source.is_file {
        Place { file: source.name.clone(), line, column: text[line_start..start].chars().count() + 1 }
    } else {
        Place { file: source.name.clone(), line: 0, column: 0 }
    };
    (place, shown.to_string(), span, from > line_start || to < line_end)
}

/// The last character boundary at or before `i`.
fn floor(text: &str, i: usize) -> usize {
    let mut i = i.min(text.len());
    while !text.is_char_boundary(i) {
        i -= 1;
    }
    i
}

/// All problems of a recipe, in the order of the file; those of the command line after them.
#[derive(Clone, Debug)]
pub struct Problems(Vec<Diagnostic>);

impl Problems {
    /// Sorts `list` by place.
    pub(super) fn new(mut list: Vec<Diagnostic>) -> Self {
        list.sort_by_key(|d| d.order);
        list.truncate(MOST);
        Self(list)
    }

    /// The problems.
    pub fn list(&self) -> &[Diagnostic] {
        &self.0
    }

    /// Every problem with its source line and hints, and a last line that counts them.
    pub fn render(&self, color: bool) -> String {
        let mut out = String::new();
        for d in &self.0 {
            out.push_str(&d.render(color));
            out.push('\n');
        }
        let (n, more) = (self.0.len(), if self.0.len() >= MOST { " or more" } else { "" });
        out.push_str(&format!("{n}{more} problem{} in the recipe", if n == 1 { "" } else { "s" }));
        out
    }
}

impl fmt::Display for Problems {
    /// As [`Problems::render`], without colour.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}
