use super::super::queue::Refused;
use super::*;
use candle_transformers::generation::Sampling;
use std::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::mpsc;

/// Events of a copy without a model; it waits after each.
#[derive(Clone, Debug, PartialEq, Eq)]
enum At {
    Answer(u32),
    Poll,
}

/// A copy without a model: reports its events and waits for permission to continue.
struct Scripted {
    name: usize,
    step: Option<u64>,
    works: bool,
    at: Sender<(usize, At)>,
    go: Receiver<()>,
}

impl Scripted {
    fn stand(&self, at: At) {
        let _ = self.at.send((self.name, at));
        let _ = self.go.recv();
    }
}

impl Backend for Scripted {
    fn step(&self) -> Option<u64> {
        self.step
    }

    fn poll(&mut self) {
        self.stand(At::Poll);
        self.step = self.step.map(|s| s + 1);
    }

    fn reply(
        &mut self,
        _: &Generation,
        prompt: &Prompt,
        send: Send<'_>,
    ) -> ft_base::Result<(FinishReason, usize)> {
        self.stand(At::Answer(prompt.ids[0]));
        self.probe()?;
        send(self.name.to_string(), Vec::new());
        Ok((FinishReason::Stop, 1))
    }

    fn probe(&mut self) -> ft_base::Result<()> {
        if self.works { Ok(()) } else { Err(candle_core::Error::Msg("the device is lost".into()).into()) }
    }
}

/// Two running copies, with their queue and controls.
struct Two<'a> {
    queue: &'a Queue,
    at: Receiver<(usize, At)>,
    go: [Sender<()>; 2],
}

/// A test that ends, or fails, ends the copies.
impl Drop for Two<'_> {
    fn drop(&mut self) {
        self.queue.close();
    }
}

/// A job with one prompt of one token, and its answer.
fn job(number: u32) -> (Job, mpsc::UnboundedReceiver<Event>) {
    let (sender, events) = mpsc::unbounded_channel();
    let generation = Generation {
        prompts: vec![Prompt { ids: vec![number], text: None }],
        max_tokens: 1,
        context: 512,
        stop: Vec::new(),
        sampling: Sampling::ArgMax,
        seed: None,
        repetition_penalty: 1.0,
        logprobs: None,
        echo: false,
        continues: true,
        step: None,
    };
    (Job { generation, events: sender, _held: None }, events)
}

impl Two<'_> {
    fn ask(&self, number: u32) -> mpsc::UnboundedReceiver<Event> {
        let (job, events) = job(number);
        self.queue.push(job).expect("there is room");
        events
    }

    fn at(&self) -> (usize, At) {
        self.at.recv_timeout(Duration::from_secs(60)).expect("a copy comes somewhere")
    }

    fn go(&self, name: usize) {
        self.go[name].send(()).expect("a copy waits");
    }
}

/// Result of a request: step and name of the copy, or the error.
fn got(mut events: mpsc::UnboundedReceiver<Event>) -> (Option<u64>, String) {
    let (mut of, mut said) = (None, String::from("nobody answered"));
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Begin(step) => of = step,
            Event::Text(text, _) => said = text,
            Event::End(..) => break,
            Event::Failed(why) => said = why,
        }
    }
    (of, said)
}

/// Runs a test with two copies, of a run or fixed, working or broken; then closes the queue.
fn two(
    step: Option<u64>,
    works: [bool; 2],
    test: impl FnOnce(Two<'_>, &[ReplicaStatus; 2]) + std::marker::Send,
) -> ft_base::Result<()> {
    let (sender, at) = channel();
    let status = ["cuda:1", "cuda:2"].map(|d| ReplicaStatus::new(d.into(), step));
    let (queue, gates) = (Queue::new(64), [channel(), channel()]);
    let [(go_0, gate_0), (go_1, gate_1)] = gates;
    let copies = [(0, gate_0), (1, gate_1)].map(|(name, go)| Scripted {
        name,
        step,
        works: works[name],
        at: sender.clone(),
        go,
    });
    std::thread::scope(|s| {
        let (queue, status) = (&queue, &status);
        let two = Two { queue, at, go: [go_0, go_1] };
        let works = status.iter().zip(copies);
        let works =
            works.map(|(status, mut copy)| (status, move || work(queue, &mut copy, status))).collect();
        let tested = s.spawn(move || test(two, status));
        let outcome = run_all(works);
        assert!(tested.join().is_ok());
        outcome
    })
}

#[test]
fn a_full_queue_drops_jobs_of_disconnected_clients() {
    let queue = Queue::new(2);
    let (first, stays) = job(0);
    let (second, goes) = job(1);
    assert_eq!([queue.push(first), queue.push(second)], [Ok(()), Ok(())]);
    let (third, _waits) = job(2);
    assert_eq!(queue.push(third), Err(Refused::Full));
    drop(goes);
    let (fourth, _waits) = job(3);
    assert_eq!(queue.push(fourth), Ok(()));
    let next = || match queue.next(None) {
        Next::Job(job) => job.generation.prompts[0].ids[0],
        _ => panic!("there is one"),
    };
    assert_eq!([next(), next()], [0, 3]);
    queue.close();
    assert!(matches!(queue.next(None), Next::Closed));
    assert_eq!(queue.push(job(4).0), Err(Refused::Closed));
    drop(stays);
}

#[test]
fn each_copy_answers_one_request_and_the_rest_wait_in_order() -> ft_base::Result<()> {
    two(None, [true; 2], |two, status| {
        let mut answers: Vec<_> = (0..5).map(|n| Some(two.ask(n))).collect();
        let mut begun = [two.at(), two.at()];
        begun.sort_by_key(|(_, at)| at == &At::Answer(1));
        assert_eq!(begun.clone().map(|b| b.1), [At::Answer(0), At::Answer(1)]);
        let (slow, quick) = (begun[0].0, begun[1].0);
        for (n, next) in [(1, Some(2)), (2, Some(3)), (3, Some(4)), (4, None)] {
            two.go(quick);
            let answer = answers[n].take().expect("asked");
            assert_eq!(got(answer), (None, quick.to_string()));
            if let Some(next) = next {
                assert_eq!(two.at(), (quick, At::Answer(next)));
            }
        }
        two.go(slow);
        assert_eq!(got(answers[0].take().expect("asked")), (None, slow.to_string()));
        assert!(!status.iter().any(ReplicaStatus::is_stopped));
    })
}

#[test]
fn a_copy_that_cannot_compute_leaves_the_rest_to_the_other() -> ft_base::Result<()> {
    two(None, [false, true], |two, status| {
        let answers = [two.ask(0), two.ask(1)];
        let begun = [two.at(), two.at()];
        assert_ne!(begun[0].0, begun[1].0);
        two.go(0);
        two.go(1);
        let mut said = answers.map(|a| got(a).1);
        said.sort();
        assert_eq!(said, ["1", "the device is lost"]);
        for n in 2..6 {
            let answer = two.ask(n);
            assert_eq!(two.at(), (1, At::Answer(n)));
            two.go(1);
            assert_eq!(got(answer).1, "1");
        }
        // the copy stops after it has said why
        while !status[0].is_stopped() {
            std::thread::yield_now();
        }
        assert!(!status[1].is_stopped());
    })
}

/// The error of an answer is followed by a test of the device, also if its client has gone.
#[test]
fn an_error_without_a_client_tests_the_device() {
    let ((at, _stands), (go, gate)) = (channel(), channel());
    let mut copy = Scripted { name: 0, step: None, works: false, at, go: gate };
    let (job, events) = job(0);
    drop((events, go));
    assert!(answer(&Queue::new(1), &mut copy, &job).is_err());
}

#[test]
fn weights_of_another_step_than_the_named_one_do_not_answer() -> ft_base::Result<()> {
    for (named, answers) in [(4, true), (3, false)] {
        let ((at, _stands), (go, gate)) = (channel(), channel());
        let mut copy = Scripted { name: 0, step: Some(4), works: true, at, go: gate };
        let (mut job, mut events) = job(0);
        job.generation.step = Some(named);
        drop(go);
        answer(&Queue::new(1), &mut copy, &job)?;
        drop(job);
        assert!(matches!(events.blocking_recv(), Some(Event::Begin(Some(4)))));
        assert_eq!(events.blocking_recv().is_some(), answers, "step {named}");
    }
    Ok(())
}

#[test]
fn the_last_copy_that_cannot_compute_ends_all() {
    let outcome = two(None, [false; 2], |two, _| {
        let (first, second, third) = (two.ask(0), two.ask(1), two.ask(2));
        let begun = [two.at(), two.at()];
        assert_ne!(begun[0].0, begun[1].0);
        two.go(0);
        two.go(1);
        assert_eq!([got(first).1, got(second).1], ["the device is lost", "the device is lost"]);
        drop(third);
    });
    assert!(outcome.is_err_and(|e| e.to_string().contains("the device is lost")));
}

#[test]
fn one_copy_takes_up_a_checkpoint_while_the_other_answers() -> ft_base::Result<()> {
    two(Some(4), [true; 2], |two, status| {
        let (polls, at) = two.at();
        assert_eq!(at, At::Poll);
        let (other, answer) = (1 - polls, two.ask(0));
        assert_eq!(two.at(), (other, At::Answer(0)));
        two.go(other);
        assert_eq!(got(answer), (Some(4), other.to_string()));
        assert_eq!(status[polls].step(), Some(4));
        two.go(polls);
        // another look by either copy shows that the first has loaded the checkpoint
        assert_eq!(two.at().1, At::Poll);
        assert_eq!((status[polls].step(), status[other].step()), (Some(5), Some(4)));
    })
}
