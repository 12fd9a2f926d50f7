//! Schedule of a pipeline stage: one forward, one backward (1F1B; Narayanan et al., 2019, 2021).

/// An action of a stage. Micro-batches are counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Forward pass; on the last stage with the head.
    Forward(usize),
    /// Backward pass.
    Backward(usize),
    /// One exchange with the stage above: hidden states go up, gradients of another micro-batch come down.
    Above(ExchangeMicros),
    /// One exchange with the stage below: hidden states come up, gradients of another micro-batch go down.
    Below(ExchangeMicros),
}

/// Micro-batches of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeMicros {
    /// Whose hidden states go up.
    pub up: Option<usize>,
    /// Whose gradients go down.
    pub down: Option<usize>,
}

/// Actions of `stage` of `stages` in a step of `micros` micro-batches. Stages below `lowest` have no backward pass. At
/// most `stages - stage` micro-batches are between their forward and their backward pass. An exchange waits for both
/// sides; the lists of all stages have no deadlock.
pub fn schedule(stages: usize, stage: usize, micros: usize, lowest: usize) -> Vec<Action> {
    let mut list = Vec::new();
    let above = |list: &mut Vec<Action>, up: Option<usize>, down: Option<usize>| {
        let down = down.filter(|_| stage >= lowest);
        if stage + 1 < stages && (up, down) != (None, None) {
            list.push(Action::Above(ExchangeMicros { up, down }));
        }
    };
    let below = |list: &mut Vec<Action>, up: Option<usize>, down: Option<usize>| {
        let down = down.filter(|_| stage > lowest);
        if stage > 0 && (up, down) != (None, None) {
            list.push(Action::Below(ExchangeMicros { up, down }));
        }
    };
    let ahead = (stages - 1 - stage).min(micros);
    for i in 0..ahead {
        below(&mut list, Some(i), None);
        list.push(Action::Forward(i));
        above(&mut list, Some(i), None);
    }
    below(&mut list, Some(ahead).filter(|i| *i < micros), None);
    for i in ahead..micros {
        list.push(Action::Forward(i));
        above(&mut list, Some(i), Some(i - ahead));
        list.push(Action::Backward(i - ahead));
        below(&mut list, Some(i + 1).filter(|i| *i < micros), Some(i - ahead));
    }
    for k in micros - ahead..micros {
        above(&mut list, None, Some(k));
        list.push(Action::Backward(k));
        below(&mut list, None, Some(k));
    }
    list.retain(|action| stage >= lowest || !matches!(action, Action::Backward(_)));
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write;

    fn word(action: Action) -> String {
        let passed = |p: ExchangeMicros| {
            let [up, down] = [p.up, p.down].map(|i| i.map_or("-".into(), |i| i.to_string()));
            format!("({up} {down})")
        };
        match action {
            Action::Forward(i) => format!("U{i}"),
            Action::Backward(i) => format!("D{i}"),
            Action::Above(p) => format!("^{}", passed(p)),
            Action::Below(p) => format!("v{}", passed(p)),
        }
    }

    #[test]
    fn schedules_of_a_few_stages_are_as_listed() {
        let mut all = String::new();
        for (stages, micros, lowest) in [(1, 2, 0), (2, 3, 0), (3, 2, 0), (4, 3, 0), (3, 3, 1)] {
            let _ = writeln!(all, "{stages} stages, {micros} micro-batches, from stage {lowest} on");
            for stage in 0..stages {
                let list = schedule(stages, stage, micros, lowest).into_iter().map(word);
                let _ = writeln!(all, "  {}", list.collect::<Vec<_>>().join(" "));
            }
        }
        let want = "\
1 stages, 2 micro-batches, from stage 0 on
  U0 D0 U1 D1
2 stages, 3 micro-batches, from stage 0 on
  U0 ^(0 -) U1 ^(1 0) D0 U2 ^(2 1) D1 ^(- 2) D2
  v(0 -) U0 D0 v(1 0) U1 D1 v(2 1) U2 D2 v(- 2)
3 stages, 2 micro-batches, from stage 0 on
  U0 ^(0 -) U1 ^(1 -) ^(- 0) D0 ^(- 1) D1
  v(0 -) U0 ^(0 -) v(1 -) U1 ^(1 0) D0 v(- 0) ^(- 1) D1 v(- 1)
  v(0 -) U0 D0 v(1 0) U1 D1 v(- 1)
4 stages, 3 micro-batches, from stage 0 on
  U0 ^(0 -) U1 ^(1 -) U2 ^(2 -) ^(- 0) D0 ^(- 1) D1 ^(- 2) D2
  v(0 -) U0 ^(0 -) v(1 -) U1 ^(1 -) v(2 -) U2 ^(2 0) D0 v(- 0) ^(- 1) D1 v(- 1) ^(- 2) D2 v(- 2)
  v(0 -) U0 ^(0 -) v(1 -) U1 ^(1 0) D0 v(2 0) U2 ^(2 1) D1 v(- 1) ^(- 2) D2 v(- 2)
  v(0 -) U0 D0 v(1 0) U1 D1 v(2 1) U2 D2 v(- 2)
3 stages, 3 micro-batches, from stage 1 on
  U0 ^(0 -) U1 ^(1 -) U2 ^(2 -)
  v(0 -) U0 ^(0 -) v(1 -) U1 ^(1 0) D0 v(2 -) U2 ^(2 1) D1 ^(- 2) D2
  v(0 -) U0 D0 v(1 0) U1 D1 v(2 1) U2 D2 v(- 2)
";
        assert_eq!(all, want);
    }

    /// Runs the lists of all stages, with exchanges that wait for both sides.
    fn simulate(lists: &[Vec<Action>]) -> Result<(), String> {
        let mut at = vec![0; lists.len()];
        loop {
            let next: Vec<Option<Action>> =
                lists.iter().zip(&at).map(|(list, i)| list.get(*i).copied()).collect();
            if next.iter().all(Option::is_none) {
                return Ok(());
            }
            let meets = |s: usize| match (next[s], next.get(s + 1).copied().flatten()) {
                (Some(Action::Above(a)), Some(Action::Below(b))) => a == b,
                _ => false,
            };
            let alone = |a: &Option<Action>| matches!(a, Some(Action::Forward(_) | Action::Backward(_)));
            let moves = |s: usize| alone(&next[s]) || meets(s) || s > 0 && meets(s - 1);
            let moving: Vec<usize> = (0..lists.len()).filter(|s| moves(*s)).collect();
            if moving.is_empty() {
                return Err(format!("stuck at {next:?}"));
            }
            moving.into_iter().for_each(|s| at[s] += 1);
        }
    }

    /// Every micro-batch goes up and down once, in order, after what it needs has come.
    fn check(stages: usize, stage: usize, micros: usize, lowest: usize, list: &[Action]) {
        let (mut came, mut up, mut down, mut dy) = (0, 0, 0, 0);
        let (first, last, trains) = (stage == 0, stage + 1 == stages, stage >= lowest);
        for action in list {
            match action {
                Action::Below(p) => {
                    p.up.iter().for_each(|i| assert_eq!(*i, came));
                    came += usize::from(p.up.is_some());
                    p.down.iter().for_each(|k| assert_eq!(*k + 1, down));
                }
                Action::Above(p) => {
                    p.up.iter().for_each(|i| assert_eq!(*i + 1, up));
                    p.down.iter().for_each(|k| assert_eq!(*k, dy));
                    dy += usize::from(p.down.is_some());
                }
                Action::Forward(i) => {
                    assert!(*i == up && (first || came > *i));
                    up += 1;
                }
                Action::Backward(k) => {
                    assert!(*k == down && up > *k && (last || dy > *k));
                    down += 1;
                }
            }
            assert!(!trains || up - down <= stages - stage, "{stages} {stage} {micros}");
        }
        assert_eq!((up, down), (micros, if trains { micros } else { 0 }));
    }

    #[test]
    fn no_lists_of_up_to_8_stages_and_16_micro_batches_wait_forever() {
        for (stages, micros) in (1..=8).flat_map(|s| (0..=16).map(move |m| (s, m))) {
            for lowest in 0..stages {
                let lists: Vec<_> = (0..stages).map(|s| schedule(stages, s, micros, lowest)).collect();
                if let Err(why) = simulate(&lists) {
                    panic!("{stages} stages, {micros} micro-batches, lowest {lowest}: {why}");
                }
                for (stage, list) in lists.iter().enumerate() {
                    check(stages, stage, micros, lowest, list);
                }
            }
        }
    }

    /// The simulator sees what separate exchanges do: both sides send first.
    #[test]
    fn exchanges_in_two_parts_wait_forever() {
        let part = |up, down| ExchangeMicros { up, down };
        let lower = vec![Action::Above(part(Some(0), None)), Action::Above(part(None, Some(0)))];
        let upper = vec![Action::Below(part(None, Some(0))), Action::Below(part(Some(0), None))];
        assert!(simulate(&[lower, upper]).is_err());
    }
}
