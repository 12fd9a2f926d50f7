//! Cards by name: memory, and rates of their data sheets.

/// Rates of NVIDIA's data sheets: bf16 products with f32 sums, without sparsity, in TFLOP/s, and memory in TB/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Datasheet {
    pub products: f64,
    pub memory: f64,
    /// Whether products reach their rate only by `wgmma` or a successor; ft's attention uses neither.
    pub warp_groups: bool,
}

const fn sheet(products: f64, memory: f64) -> Datasheet {
    Datasheet { products, memory, warp_groups: false }
}

const fn hopper(products: f64, memory: f64) -> Datasheet {
    Datasheet { products, memory, warp_groups: true }
}

/// Name, memory in MiB as the driver reports it to programs, by PyTorch's messages on such cards, and rates.
const CARDS: &[(&str, u64, Datasheet)] = &[
    ("L4", 22_559, sheet(121.0, 0.300)),
    ("A10", 22_600, sheet(125.0, 0.600)),
    ("4090", 24_084, sheet(165.2, 1.008)),
    ("3090", 24_135, sheet(71.0, 0.936)),
    ("5090", 32_113, sheet(209.5, 1.792)),
    ("A100-40", 40_335, sheet(312.0, 1.555)),
    ("L40S", 45_455, sheet(362.0, 0.864)),
    ("A6000", 48_537, sheet(154.8, 0.768)),
    ("H100", 80_998, hopper(989.0, 3.350)),
    ("A100-80", 81_039, sheet(312.0, 2.039)),
    ("H200", 143_155, hopper(989.0, 4.800)),
    ("B200", 182_630, hopper(2250.0, 8.000)),
];

/// Cards without code in ft, by a word of their names, and their compute capabilities.
const TOO_OLD: [(&str, (i32, i32)); 4] =
    [("p100", (6, 0)), ("v100", (7, 0)), ("t4", (7, 5)), ("2080", (7, 5))];

/// Memory of a program's context on a card, in MiB.
const CONTEXT: u64 = 512;

/// Words of a name in lower case, without the maker's.
fn words(name: &str) -> Vec<String> {
    let of = |w: &str| w.strip_suffix("gb").unwrap_or(w).to_string();
    let name = name.to_lowercase();
    let words = name.split([' ', '-', '_']).filter(|w| !["nvidia", "geforce", "rtx", "tesla"].contains(w));
    words.map(of).collect()
}

/// A card by its name, with the maker's words around it or without ("RTX 4090", "a100-80gb"): name in the table, and
/// default bytes of a run, 95% of the memory left by a context.
pub fn card(name: &str) -> Option<(&'static str, u64)> {
    let wanted = words(name).concat();
    let (name, mib, _) = CARDS.iter().find(|(name, ..)| words(name).concat() == wanted)?;
    Some((name, ((mib - CONTEXT) << 20) / 20 * 19))
}

/// Why ft does not run on a card of this name: see [`ft_kernels::cuda::too_old`].
pub fn card_too_old(name: &str) -> Option<String> {
    let there = words(name);
    let (_, capability) = TOO_OLD.iter().find(|(old, _)| there.iter().any(|w| w == old))?;
    ft_kernels::cuda::too_old(name, *capability)
}

/// A card by the driver's name for it ("NVIDIA A100-SXM4-80GB"). Cards of laptops and parts of a card
/// are different cards.
pub fn of_driver(name: &str) -> Option<&'static str> {
    let there = words(name);
    let has = |w: &str| there.iter().any(|t| t == w);
    let is = |name: &str| words(name).iter().all(|w| has(w)) && !has("laptop") && !has("mig");
    CARDS.iter().map(|(name, ..)| *name).find(|name| is(name))
}

/// Rates of a card, by name in the table.
pub fn datasheet_of(name: &str) -> Option<Datasheet> {
    CARDS.iter().find(|(n, ..)| *n == name).map(|(.., sheet)| *sheet)
}

/// Whether a card of the table lacks products of 8-bit floats (compute capability below 8.9).
pub fn lacks_fp8(name: &str) -> bool {
    const HAVE: [&str; 7] = ["L4", "4090", "5090", "L40S", "H100", "H200", "B200"];
    CARDS.iter().any(|(card, ..)| *card == name) && !HAVE.contains(&name)
}

/// Names of the cards, for messages.
pub fn card_names() -> String {
    CARDS.iter().map(|(name, ..)| *name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_found_by_the_names_that_people_use() {
        let of = |name: &str| card(name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(of("RTX 4090"), of("4090"));
        assert_eq!(of("NVIDIA A100-80GB"), of("a100-80"));
        assert!(
            of("A100-40").1 < of("L40S").1 && of("L40S").1 < of("A6000").1 && of("H100").1 < of("H200").1
        );
        // a run leaves room for the context and for other processes
        assert!((20 << 30..23 << 30).contains(&of("3090").1));
        assert_eq!((card("A100"), card("48GB"), card("")), (None, None, None));
        assert!(CARDS.is_sorted_by(|a, b| a.1 < b.1));
        for old in ["T4", "V100-32", "NVIDIA GeForce RTX 2080 Ti"] {
            assert!(
                card_too_old(old).is_some_and(|why| why.starts_with(old)) && card(old).is_none(),
                "{old}"
            );
        }
        assert!(CARDS.iter().all(|(name, ..)| card_too_old(name).is_none()));
    }

    #[test]
    fn cards_are_found_by_the_names_that_drivers_give() {
        for (name, is) in [
            ("NVIDIA H100 80GB HBM3", Some("H100")),
            ("NVIDIA A100-SXM4-80GB", Some("A100-80")),
            ("NVIDIA A100-PCIE-40GB", Some("A100-40")),
            ("NVIDIA GeForce RTX 4090", Some("4090")),
            ("NVIDIA L4", Some("L4")),
            ("NVIDIA L40S", Some("L40S")),
            ("NVIDIA RTX A6000", Some("A6000")),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
            ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
            ("Tesla T4", None),
            ("emulated GPU", None),
        ] {
            assert_eq!(of_driver(name), is, "{name}");
        }
    }
}
