//! Memory of cards by name.

/// Name, and memory in MiB as the driver reports it to programs, by PyTorch's messages on such cards.
const CARDS: &[(&str, u64)] = &[
    ("T4", 14_909),
    ("V100-16", 16_150),
    ("L4", 22_559),
    ("A10", 22_600),
    ("4090", 24_084),
    ("3090", 24_135),
    ("5090", 32_113),
    ("V100-32", 32_490),
    ("A100-40", 40_335),
    ("L40S", 45_455),
    ("A6000", 48_537),
    ("H100", 80_998),
    ("A100-80", 81_039),
    ("H200", 143_155),
    ("B200", 182_630),
];

/// Memory of a program's context on a card, in MiB.
const CONTEXT: u64 = 512;

/// Bytes that a run takes on a card by default: 95% of what a context leaves free. `name` may have the maker's
/// words around it ("RTX 4090", "a100-80gb").
pub fn card(name: &str) -> Option<u64> {
    let plain = |text: &str| -> String {
        let text = text.to_lowercase();
        let words =
            text.split([' ', '-', '_']).filter(|w| !["nvidia", "geforce", "rtx", "tesla"].contains(w));
        words.map(|w| w.strip_suffix("gb").unwrap_or(w)).collect()
    };
    let wanted = plain(name);
    let (_, mib) = CARDS.iter().find(|(name, _)| plain(name) == wanted)?;
    Some(((mib - CONTEXT) << 20) / 20 * 19)
}

/// Names of the cards, for messages.
pub fn card_names() -> String {
    CARDS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_found_by_the_names_that_people_use() {
        let of = |name: &str| card(name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(of("RTX 4090"), of("4090"));
        assert_eq!(of("NVIDIA A100-80GB"), of("a100-80"));
        assert!(of("A100-40") < of("L40S") && of("L40S") < of("A6000") && of("H100") < of("H200"));
        // a run leaves room for the context and for others
        assert!((20 << 30..23 << 30).contains(&of("3090")));
        assert_eq!((card("A100"), card("48GB"), card("")), (None, None, None));
        assert!(CARDS.is_sorted_by(|a, b| a.1 < b.1));
    }
}
