//! Stop strings in streamed text.

/// Detects stop strings, holding back a possible beginning of one.
pub(super) struct StopStrings {
    strings: Vec<String>,
    held_back: String,
    /// Whether a stop string occurred.
    pub hit: bool,
}

impl StopStrings {
    pub fn new(strings: Vec<String>) -> Self {
        Self { strings, held_back: String::new(), hit: false }
    }

    /// Text ready to send after this piece, and whether to continue.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        if self.hit {
            return (String::new(), false);
        }
        self.held_back.push_str(piece);
        if let Some(at) = self.strings.iter().filter_map(|s| self.held_back.find(s.as_str())).min() {
            self.hit = true;
            let mut text = std::mem::take(&mut self.held_back);
            text.truncate(at);
            return (text, false);
        }
        // longest suffix able to begin a stop string
        let begins = |at: &usize| self.strings.iter().any(|s| s.starts_with(&self.held_back[*at..]));
        let mut ends = self.held_back.char_indices().map(|(at, _)| at);
        let keep = ends.find(begins).unwrap_or(self.held_back.len());
        let rest = self.held_back.split_off(keep);
        (std::mem::replace(&mut self.held_back, rest), true)
    }

    /// Text still held back at the end.
    pub fn rest(&mut self) -> String {
        std::mem::take(&mut self.held_back)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through(texts: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut stops = StopStrings::new(texts.iter().map(|t| t.to_string()).collect());
        let mut out = String::new();
        for piece in pieces {
            let (text, go_on) = stops.push(piece);
            out += &text;
            if !go_on {
                break;
            }
        }
        out += &stops.rest();
        (out, stops.hit)
    }

    #[test]
    fn a_stop_text_is_found_across_pieces_and_never_sent() {
        assert_eq!(through(&["END"], &["a E", "N", "D b"]), ("a ".into(), true));
        assert_eq!(through(&["END"], &["a E", "N", "x"]), ("a ENx".into(), false));
        assert_eq!(through(&["aab"], &["a", "a", "a", "b", "c"]), ("a".into(), true));
        assert_eq!(through(&["\n\n", "x"], &["é\n", "é", "x\n\n"]), ("é\né".into(), true));
        assert_eq!(through(&[], &["a", "b"]), ("ab".into(), false));
        assert_eq!(through(&["END"], &["a EN"]), ("a EN".into(), false));
    }
}
