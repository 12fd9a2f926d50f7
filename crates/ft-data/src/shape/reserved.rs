//! Unicode noncharacters: marks in rendered text, refused in rows. They have no use in text and no tokens.

/// Whether `c` is a noncharacter reserved for marks in a rendering.
pub(crate) fn is_reserved(c: char) -> bool {
    ('\u{FDD0}'..='\u{FDEF}').contains(&c)
}
