//! Proof that a rendered text contains the whole conversation, without a second rendering.
//!
//! Marks ([`super::marks`]) locate every string in the text at the cost of a rendering. Most conversations
//! do not need marks: the strings are long, and appear in the text one after another, complete. Since
//! matches do not overlap, a match cannot belong to another string; and since the string contains words
//! absent from the template source, the match cannot be literal template text. All other cases are left to
//! the marks: calls and tools (rendered in any order and as JSON), strings without a long run of words,
//! optional message keys, and strings that resemble template markers.

use super::fragments::{Fragment, Kind};
use super::template::{Template, Variables};
use crate::shape::messages::Chat;

/// Least length of a string's longest run of words, in bytes.
const LEAST: usize = 12;
/// Characters of template markers.
const MARKERS: [char; 7] = ['<', '>', '[', ']', '{', '}', '|'];

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
        let is_plain = fragment.kind == Kind::Content && !whole.contains(MARKERS);
        let Some(at) = text[from..].find(whole).filter(|_| is_plain) else { return false };
        from += at + whole.len();
        // a template may also render the value of any variable
        let said = variables.values().any(|v| v.as_str().map_or(v.len().is_some(), |v| v.contains(whole)));
        let words = words(whole);
        !said && words.len() >= LEAST && !template.spells(words)
    })
}

/// The longest run of characters that a template literal would spell verbatim, without escapes.
fn words(text: &str) -> &str {
    let escaped = |c: char| c.is_ascii() && !c.is_ascii_alphanumeric() && !matches!(c, ' ' | ',' | '.');
    text.split(escaped).max_by_key(|run| run.len()).unwrap_or_default()
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
            rows(&[("user", "Why? Since when?"), ("assistant", A)]),
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
