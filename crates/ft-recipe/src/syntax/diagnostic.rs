//! Problems of a recipe, and their rendering.
//!
//! A problem contains the affected source line, to be shown long after the file was read. Only this file depends on the
//! renderer.

use annotate_snippets::renderer::DecorStyle;
use annotate_snippets::{AnnotationKind, Level, Origin, Renderer, Snippet};
use ft_base::error::Location;
use ft_base::terminal::escape;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

/// Maximum length of the source excerpt shown with a problem, in bytes on each side of the position.
const SHOWN: usize = 120;

/// Maximum number of reported problems, to bound time and output.
pub(crate) const MAX_PROBLEMS: usize = 100;

/// A source text: the recipe file, or one `KEY=VALUE` from the command line.
#[derive(Clone, Debug)]
pub(crate) struct SourceText {
    /// Name in messages.
    pub name: String,
    pub text: String,
    /// False for a `KEY=VALUE`, shown without line numbers.
    pub is_file: bool,
    /// Byte offset of each line start.
    lines: Vec<usize>,
}

impl SourceText {
    /// The text of a recipe file.
    pub fn file(name: String, text: String) -> Self {
        let lines = std::iter::once(0).chain(text.match_indices('\n').map(|(i, _)| i + 1)).collect();
        Self { name, text, is_file: true, lines }
    }

    /// A `KEY=VALUE` from the command line.
    pub fn argument(text: &str) -> Self {
        let shown: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        let name = format!("command line: {}", masked(&shown));
        Self { name, text: text.into(), is_file: false, lines: vec![0] }
    }
}

/// Replaces user and password of a URL by as many stars as bytes. In a value of `log.mlflow`, the scheme may be absent.
fn masked(text: &str) -> Cow<'_, str> {
    if !text.contains('@') {
        return text.into();
    }
    let bare = text.contains("mlflow");
    let word = |word: &str| {
        let (head, tail) = word.split_at(word.rfind('@').unwrap_or(0));
        let user = match head.split_once("://") {
            Some((_, user)) => user,
            None if bare => head.rsplit('=').next().unwrap_or(head),
            None => "",
        };
        // hf://datasets/a/b@main is a path with a revision
        let hidden = if user.contains(':') || !user.contains('/') { user.len() } else { 0 };
        format!("{}{}{tail}", &head[..head.len() - hidden], "*".repeat(hidden))
    };
    text.split_inclusive(['"', '\'', ' ', '\n']).map(word).collect::<String>().into()
}

/// A byte range in one of the texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Index of the text: 0 is the file, `i` is override `i - 1`.
    pub text: usize,
    pub bytes: Range<usize>,
}

/// One problem of a recipe.
#[derive(Clone, Debug)]
pub struct Diagnostic {
    /// Position of the problem.
    pub place: Location,
    /// Dotted path of the affected key, if any.
    pub key: Option<String>,
    /// Error message.
    pub message: String,
    /// Suggested fixes, one per line.
    pub hints: Vec<String>,
    /// Excerpt of the source line.
    line: String,
    /// Underlined byte range of `line`.
    span: Range<usize>,
    /// Whether `line` omits a part of the source line.
    cut: bool,
    /// Sort key: text index and byte offset.
    order: (usize, usize),
}

impl Diagnostic {
    /// Creates a problem at `at`.
    pub(crate) fn new(texts: &[SourceText], at: &Span, message: impl Into<String>) -> Self {
        let (place, line, span, cut) = locate(texts, at);
        let message: String = message.into();
        Self {
            place,
            key: None,
            message: masked(&message).into_owned(),
            hints: Vec::new(),
            line,
            span,
            cut,
            order: (at.text, at.bytes.start),
        }
    }

    /// Sets the key.
    pub(crate) fn key(mut self, key: &str) -> Self {
        self.key = Some(key.to_string());
        self
    }

    /// Adds a hint.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        let hint: String = hint.into();
        self.hints.push(masked(&hint).into_owned());
        self
    }

    /// Renders the message with source line, underline and hints, ending in a line break.
    pub fn render(&self, color: bool) -> String {
        let renderer = if color { Renderer::styled() } else { Renderer::plain() };
        let renderer = renderer.decor_style(DecorStyle::Ascii);
        // Text of the recipe is escaped before color codes are added.
        let (message, file, line) = (escape(&self.message), escape(&self.place.file), escape(&self.line));
        let start = escape(&self.line[..self.span.start]).len();
        let span = start..start + escape(&self.line[self.span.clone()]).len();
        let hints: Vec<_> = self.hints.iter().map(|h| escape(h)).collect();
        let title = Level::ERROR.primary_title(message.as_ref());
        let snippet = Snippet::source(line.as_ref())
            .line_start(self.place.line.max(1))
            .annotation(AnnotationKind::Primary.span(span));
        let mut group = if self.place.line == 0 || self.line.is_empty() {
            // Command line argument: the name of the place contains the whole text.
            title.element(origin(&self.place, &file))
        } else if self.cut {
            // The renderer would compute the column from the excerpt, which is wrong for a partial line.
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

fn origin<'a>(place: &Location, file: &'a str) -> Origin<'a> {
    let origin = Origin::path(file);
    if place.line > 0 { origin.line(place.line).char_column(place.column) } else { origin }
}

/// Returns the position of `at`, the excerpt of the first line, the underlined range of the excerpt, and
/// whether the excerpt omits a part of the line.
fn locate(texts: &[SourceText], at: &Span) -> (Location, String, Range<usize>, bool) {
    let Some(source) = texts.get(at.text) else {
        return (Location { file: "recipe".into(), line: 0, column: 0 }, String::new(), 0..0, false);
    };
    let text = source.text.as_str();
    let start = text.floor_char_boundary(at.bytes.start);
    let line = source.lines.partition_point(|begin| *begin <= start).max(1);
    let line_start = source.lines.get(line - 1).copied().unwrap_or(0);
    let line_end = text[start..].find('\n').map_or(text.len(), |i| start + i);
    let end = text.floor_char_boundary(at.bytes.end).clamp(start, line_end);
    // Shows a very long line only around the position.
    let from = text.floor_char_boundary(start.saturating_sub(SHOWN).max(line_start));
    let to = text.floor_char_boundary((start + SHOWN).min(line_end));
    let whole = masked(&text[line_start..line_end]);
    let shown = whole[from - line_start..to - line_start].trim_end_matches('\r');
    let span = (start - from).min(shown.len())..(end - from).min(shown.len());
    let place = if source.is_file {
        Location { file: source.name.clone(), line, column: text[line_start..start].chars().count() + 1 }
    } else {
        Location { file: source.name.clone(), line: 0, column: 0 }
    };
    (place, shown.to_string(), span, from > line_start || to < line_end)
}

/// The problems of a recipe in file order, followed by problems of the command line.
#[derive(Clone, Debug)]
pub struct Problems(Vec<Diagnostic>);

impl Problems {
    /// Sorts the problems by position, and drops any beyond the maximum.
    pub(crate) fn new(mut list: Vec<Diagnostic>) -> Self {
        list.sort_by_key(|d| d.order);
        list.truncate(MAX_PROBLEMS);
        Self(list)
    }

    /// The problems in order.
    pub fn list(&self) -> &[Diagnostic] {
        &self.0
    }

    /// Renders all problems, followed by a line with the count.
    pub fn render(&self, color: bool) -> String {
        let mut out = String::new();
        for d in &self.0 {
            out.push_str(&d.render(color));
            out.push('\n');
        }
        let (n, more) = (self.0.len(), if self.0.len() >= MAX_PROBLEMS { " or more" } else { "" });
        out.push_str(&format!("{n}{more} problem{} in the recipe", if n == 1 { "" } else { "s" }));
        out
    }
}

impl fmt::Display for Problems {
    /// Like [`Problems::render`], without color.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}
