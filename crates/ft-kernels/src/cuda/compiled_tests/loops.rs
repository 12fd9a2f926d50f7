//! Hot loops of machine code: of the innermost loops of a kernel with tensor-core instructions and a barrier, the one
//! with the most of these instructions, of several the longest. (Loops without a barrier are parts of a stage.)

use super::{run, tool};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// Cycles of a quarter of a multiprocessor for one mma.m16n8k16 (f32 sums) by card, from the products a second of the
/// data sheets. On 9.0, mma reaches about 0.6 of the rate of wgmma, for which the sheet stands.
const TENSOR_CYCLES: [f64; 4] = [8.0, 16.0, 16.0, 6.5];
/// The same for one ldmatrix.x4: 512 bytes, of 128 a cycle for all four quarters.
const SHARED_CYCLES: f64 = 16.0;

/// Instructions of a hot loop.
#[derive(Clone, Copy, Debug, Default)]
pub struct Loop {
    pub instructions: usize,
    /// HMMA.
    pub tensor: usize,
    /// LDSM.
    pub shared: usize,
    /// HMMA under a predicate.
    pub predicated: usize,
    /// Accesses to local memory and divergent branches, in the whole kernel.
    pub lost: usize,
}

impl Loop {
    /// Largest of the cycles that a warp takes of tensor cores, of issue slots and of shared memory, and which it is.
    fn bound(&self, card: usize) -> (f64, &'static str) {
        let all = [
            (self.tensor as f64 * TENSOR_CYCLES[card], "tensor"),
            (self.instructions as f64, "issue"),
            (self.shared as f64 * SHARED_CYCLES, "shared"),
        ];
        all.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default()
    }

    /// Instructions, HMMA, LDSM, and the bound.
    pub fn words(&self, card: usize) -> String {
        let (cycles, by) = self.bound(card);
        format!("{self}:{cycles:.0}-{by}")
    }
}

impl fmt::Display for Loop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.instructions, self.tensor, self.shared)
    }
}

/// Hot loops of the kernels of a cubin that have any.
pub fn of(cubin: &Path) -> BTreeMap<String, Loop> {
    let text = run(tool("cuobjdump").arg("-sass").arg(cubin));
    let kernels = text.split("Function : ").skip(1);
    kernels
        .filter_map(|kernel| {
            let (name, body) = kernel.split_once('\n')?;
            hottest(&body.lines().filter_map(instruction).collect::<Vec<_>>())
                .map(|found| (name.trim().into(), found))
        })
        .collect()
}

/// Address and text of an instruction: `/*0a10*/ @P0 HMMA.16816.F32.BF16 R4, R8, R12, R4 ;`.
fn instruction(line: &str) -> Option<(u32, &str)> {
    let (address, rest) = line.trim().strip_prefix("/*")?.split_once("*/")?;
    Some((u32::from_str_radix(address, 16).ok()?, rest.split(';').next()?.trim()))
        .filter(|(_, t)| !t.is_empty())
}

/// Target of a branch.
fn target(text: &str) -> Option<u32> {
    let at = text.contains("BRA").then(|| text.rfind("0x")).flatten()?;
    let digits = text[at + 2..].split(|c: char| !c.is_ascii_hexdigit()).next()?;
    u32::from_str_radix(digits, 16).ok()
}

fn hottest(all: &[(u32, &str)]) -> Option<Loop> {
    let count = |of: &[(u32, &str)], words: &[&str]| {
        of.iter().filter(|(_, text)| words.iter().any(|w| text.contains(w))).count()
    };
    // by first instruction; of several branches back to it, the last one ends the loop
    let mut loops = BTreeMap::new();
    for (end, (_, text)) in all.iter().enumerate() {
        let start = target(text).and_then(|to| all[..=end].iter().position(|(address, _)| *address == to));
        let hot = |body: &[(u32, &str)]| ["HMMA", "BAR.SYNC"].iter().all(|w| count(body, &[w]) > 0);
        if let Some(start) = start.filter(|start| hot(&all[*start..=end])) {
            loops.insert(start, end);
        }
    }
    let innermost =
        loops.iter().filter(|(start, end)| !loops.iter().any(|(other, last)| other > *start && last <= *end));
    let bodies = innermost.map(|(start, end)| &all[*start..=*end]);
    let body = bodies.max_by_key(|body| (count(body, &["HMMA"]), body.len()))?;
    Some(Loop {
        instructions: body.len(),
        tensor: count(body, &["HMMA"]),
        shared: count(body, &["LDSM"]),
        predicated: body.iter().filter(|(_, text)| text.starts_with('@') && text.contains("HMMA")).count(),
        lost: count(all, &["LDL", "STL", "BRA.DIV"]),
    })
}
