//! Proof that a rendered text contains the whole conversation, without a second rendering.
//!
//! Marks ([`super::marks`]) locate every string in the text at the cost of a rendering. Most conversations
//! do not need marks: the strings are long, and appear in the text one after another, complete. Since
//! matches do not overlap, a match cannot belong to another string; and since the string contains a byte
//! sequence absent from the template source, the match cannot be literal template text. All other cases are
//! left to the marks: calls and tools (rendered in any order and as JSON), short strings, optional message
//! keys, and strings that resemble template markers.

use super::fragments::{Fragment, Kind};
use super::template::{Template, Variables, WINDOW};
use crate::shape::messages::Chat;

/// Shortest string to search for, in bytes.
const LEAST: usize = 12;
/// Typical limit of the template text between two messages, in bytes.
const BETWEEN: usize = 64;

/// Whether `text` provably contains all strings of the conversation in place, as marks would show.
pub(super) fn proven(
    chat: &Chat,
    fragments: &[Fragment],
    text: &str,
    template: &Template,
    variables: &Variables,
) -> bool {
    let plain = |m: &serde_json::Value| m.as_object().is_some_and(|m| m.len() == 2);
    if chat.tools.is_some() || !chat.messages.iter().all(plain) {
        return false;
    }
    let mut from = 0;
    fragments.iter().all(|fragment| {
        let whole = fragment.of(chat);
        let is_certain = fragment.kind == Kind::Content && is_plain(whole);
        let Some(at) = next(text, from, whole).filter(|_| is_certain) else { return false };
        from = at + whole.len();
        // a template may also render the value of any variable
        let said = variables.values().any(|v| v.as_str().map_or(v.len().is_some(), |v| v.contains(whole)));
        !said && whole.as_bytes().windows(WINDOW).any(|w| is_word(w) && !template.spells(w))
    })
}

/// Finds `whole` in `text` at or after `from`. Tries nearby positions first, to save the setup cost of a
/// search.
fn next(text: &str, from: usize, whole: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let close = (from..text.len().min(from + BETWEEN)).find(|at| bytes[*at..].starts_with(whole.as_bytes()));
    close.or_else(|| text[from..].find(whole).map(|at| from + at))
}

/// Whether a string is long and free of characters used in template markers.
fn is_plain(text: &str) -> bool {
    text.len() >= LEAST && !text.bytes().any(|b| matches!(b, b'<' | b'>' | b'[' | b']' | b'{' | b'}' | b'|'))
}

/// Whether a template literal would spell these bytes verbatim, without escapes.
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

    /// Reads a row, and reports whether a single rendering sufficed, as the fast proof succeeded.
    fn both(other: &str, row: &Value) -> (Result<String, String>, bool) {
        let t = with_template(&format!("{HEAD}{other}{TAIL}"));
        let (plain, count) = crate::text::template::renderings(|| read(&t, row, &Map::new()));
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
            // with little and with much text between messages
            for between in ["", &"Here speaks ".repeat(9)] {
                let (text, one) = both(&format!("{between}{{{{ m.role }}}}: {{{{ m.content }}}}\n"), &row);
                assert!(text.is_ok() && one, "{row}: {text:?}");
            }
        }
        // rows outside the fast path are rendered again, and pass
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

    /// The characters of a missing string occur in the text, but elsewhere.
    #[test]
    fn a_string_found_elsewhere_in_the_text_counts_as_missing() {
        let asked = rows(&[("user", Q), ("assistant", A)]);
        let twice = rows(&[("user", Q), ("assistant", A), ("user", Q), ("assistant", A)]);
        for (other, row, path) in [
            // in literal template text
            (format!("{Q}\n"), &asked, "messages[0].content"),
            // of two duplicates, one is missing
            ("{% if loop.first %}{{ m.content }}\n{% endif %}".into(), &twice, "messages[2].content"),
            ("{% if not loop.first %}{{ m.content }}\n{% endif %}".into(), &twice, "messages[0].content"),
            // inside a longer string
            (
                "{% if not loop.first %}{{ m.content }}\n{% endif %}".into(),
                &rows(&[("system", Q), ("user", &format!("{Q} And at night?")), ("assistant", A)]),
                "messages[0].content",
            ),
            // truncated or changed
            ("{{ m.content[:30] }}\n".into(), &asked, "messages[0].content"),
            ("{{ m.content | upper }}\n".into(), &asked, "messages[0].content"),
        ] {
            let (text, _) = both(&other, row);
            let error = text.expect_err(&other);
            assert!(error.starts_with(path), "{other}: {error}");
        }
    }
}
