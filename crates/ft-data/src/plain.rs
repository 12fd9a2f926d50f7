//! A proof that a text holds what its conversation says, without a second rendering.
//!
//! Marks ([`super::marks`]) show each string where the template wrote it, and cost a rendering. Most conversations do not
//! need them: their strings are long, and stand in the text one behind the other, each whole. Such a string cannot be
//! another one's, or a part of one, for those stand elsewhere; and it cannot be the template's own words, for it holds
//! characters in a row that the template does not spell. What is not as plain is left to the marks: calls and
//! tools, whose strings come in any order and as JSON, short strings, keys that some templates write, and what looks
//! like a template's markers.

use super::gate::Piece;
use super::messages::Chat;
use super::template::{Template, Variables};

/// Bytes of the shortest string that is looked for.
const LEAST: usize = 12;
/// Bytes that templates put between messages, nearly always.
const BETWEEN: usize = 64;
/// Bytes in a row that a template does not spell where they come from elsewhere.
pub(super) const WINDOW: usize = 8;

/// Whether `text` holds each of the conversation's strings at its place, as marks would show.
pub(super) fn proven(
    chat: &Chat,
    pieces: &[Piece],
    text: &str,
    template: &Template,
    variables: &Variables,
) -> bool {
    let plain = |m: &serde_json::Value| m.as_object().is_some_and(|m| m.len() == 2);
    if chat.tools.is_some() || !chat.messages.iter().all(plain) {
        return false;
    }
    let mut from = 0;
    pieces.iter().all(|piece| {
        let whole = piece.of(chat);
        let Some(at) = next(text, from, whole).filter(|_| piece.is_content() && is_plain(whole)) else {
            return false;
        };
        from = at + whole.len();
        // a variable may be anything, and a template may write it
        let said = variables.values().any(|v| v.as_str().map_or(v.len().is_some(), |v| v.contains(whole)));
        !said && whole.as_bytes().windows(WINDOW).any(|w| is_word(w) && !template.spells(w))
    })
}

/// Where a string stands in a text, from a place on. It is nearly always close by, and is found there without what a
/// search costs to set up.
fn next(text: &str, from: usize, whole: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let close = (from..text.len().min(from + BETWEEN)).find(|at| bytes[*at..].starts_with(whole.as_bytes()));
    close.or_else(|| text[from..].find(whole).map(|at| from + at))
}

/// Whether a string is long, and nothing that templates put around messages is in it.
fn is_plain(text: &str) -> bool {
    text.len() >= LEAST && !text.bytes().any(|b| matches!(b, b'<' | b'>' | b'[' | b']' | b'{' | b'}' | b'|'))
}

/// Whether a template would spell these bytes as they are: no escapes.
fn is_word(window: &[u8]) -> bool {
    window.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b' ' | b',' | b'.' | 0x80..))
}

#[cfg(test)]
mod tests {
    use crate::tests::chat::{read, with_template};
    use serde_json::{Map, Value, json};

    const HEAD: &str = "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}</a>{% endgeneration %}{% else %}";
    const TAIL: &str = "{% endif %}{% endfor %}";
    const Q: &str = "What is the colour of the sky at noon?";
    const A: &str = "Blue, as far as anybody here can tell.";

    fn rows(messages: &[(&str, &str)]) -> Value {
        let list: Vec<Value> = messages.iter().map(|(r, c)| json!({"role": r, "content": c})).collect();
        json!({ "messages": list })
    }

    /// Both ways, and whether the plain one proved the row.
    fn both(other: &str, row: &Value) -> (Result<String, String>, bool) {
        let t = with_template(&format!("{HEAD}{other}{TAIL}"));
        let (plain, count) = super::super::template::renderings(|| read(&t, row, &Map::new()));
        (plain.map(|p| p.0), count == 1)
    }

    #[test]
    fn long_strings_in_order_need_one_rendering() {
        for row in [
            rows(&[("user", Q), ("assistant", A)]),
            rows(&[
                ("system", "Answer in one sentence."),
                ("user", Q),
                ("assistant", A),
                ("user", Q),
                ("assistant", A),
            ]),
            rows(&[("user", &format!("  {Q}\n")), ("assistant", &format!("{A}\n\n{A}"))]),
            rows(&[("user", "Какого цвета небо?"), ("assistant", A)]),
            rows(&[("user", "Tell me more"), ("assistant", A)]),
        ] {
            // close to what was before, and not
            for between in ["", &"Here speaks ".repeat(9)] {
                let (text, one) = both(&format!("{between}{{{{ m.role }}}}: {{{{ m.content }}}}\n"), &row);
                assert!(text.is_ok() && one, "{row}: {text:?}");
            }
        }
        // what is not plain is rendered again, and holds
        for row in [
            rows(&[("user", "Tell us all"), ("assistant", A)]),
            rows(&[("user", &format!("{Q}<|im_end|>")), ("assistant", A)]),
            rows(&[
                ("user", Q),
                ("assistant", &format!("<think>\nlong thoughts, long thoughts\n</think>\n\n{A}")),
            ]),
        ] {
            let (text, one) = both("{{ m.role }}: {{ m.content }}\n", &row);
            assert!(text.is_ok() && !one, "{row}: {text:?}");
        }
    }

    /// The text holds the characters of what was left out, and yet not the string.
    #[test]
    fn what_stands_elsewhere_proves_nothing() {
        let asked = rows(&[("user", Q), ("assistant", A)]);
        let twice = rows(&[("user", Q), ("assistant", A), ("user", Q), ("assistant", A)]);
        for (other, row, path) in [
            // the template's own words
            (format!("{Q}\n"), &asked, "messages[0].content"),
            // duplicates, one of them left out
            ("{% if loop.first %}{{ m.content }}\n{% endif %}".into(), &twice, "messages[2].content"),
            ("{% if not loop.first %}{{ m.content }}\n{% endif %}".into(), &twice, "messages[0].content"),
            // within a longer one
            (
                "{% if not loop.first %}{{ m.content }}\n{% endif %}".into(),
                &rows(&[("system", Q), ("user", &format!("{Q} And at night?")), ("assistant", A)]),
                "messages[0].content",
            ),
            // cut, and changed
            ("{{ m.content[:30] }}\n".into(), &asked, "messages[0].content"),
            ("{{ m.content | upper }}\n".into(), &asked, "messages[0].content"),
        ] {
            let (text, _) = both(&other, row);
            let error = text.expect_err(&other);
            assert!(error.starts_with(path), "{other}: {error}");
        }
    }
}
