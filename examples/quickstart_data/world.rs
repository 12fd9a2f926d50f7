//! The small closed world of the quickstart model: questions in several wordings, with one answer each.

use super::tables::*;

/// A question with an answer.
pub struct Fact {
    /// Wordings of the question.
    pub asks: Vec<String>,
    pub reply: String,
}

/// Facts of one kind, with a sampling weight.
pub struct Topic {
    /// Relative frequency in conversation turns.
    pub weight: u32,
    pub facts: Vec<Fact>,
}

/// "an apple", "a pear".
fn a(noun: &str) -> String {
    let article = if noun.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {noun}")
}

/// Capitalizes the first letter.
pub fn upper(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |c| c.to_uppercase().collect::<String>() + chars.as_str())
}

fn fact<S: Into<String>, const N: usize>(asks: [S; N], reply: impl Into<String>) -> Fact {
    Fact { asks: asks.into_iter().map(Into::into).collect(), reply: reply.into() }
}

#[expect(clippy::too_many_lines, reason = "a list of the world's facts")]
fn talk() -> Vec<Fact> {
    vec![
        fact(
            ["Hello!", "Hello", "Hello there!", "Hi!", "Hi", "Hi there!", "Hey!", "Good day!"],
            "Hello! How can I help you?",
        ),
        fact(["Good morning!", "Good morning", "Morning!"], "Good morning! I hope you slept well."),
        fact(["Good evening!", "Good evening"], "Good evening! How was your day?"),
        fact(["Good night!", "Good night", "I am going to bed."], "Good night! Sleep well."),
        fact(
            ["Who are you?", "What is your name?", "Tell me your name.", "What are you called?"],
            "I am Pip, a very small language model.",
        ),
        fact(
            ["What are you?", "Are you a human?", "Are you a person?", "Are you a robot?"],
            "I am a language model. I am made of numbers.",
        ),
        fact(
            ["How are you?", "How are you today?", "How do you do?", "Are you well?"],
            "I am very well, thank you. How are you?",
        ),
        fact(["I am well.", "I am fine, thanks.", "Very well.", "I am good."], "I am glad to hear that."),
        fact(
            ["I am sad.", "I feel bad today.", "I had a bad day."],
            "I am sorry to hear that. Tomorrow is a new day.",
        ),
        fact(
            ["What can you do?", "What do you know?", "Can you help me?", "Help!", "How can you help me?"],
            "I know colours, animals, food, numbers, days and more. I can tell stories too.",
        ),
        fact(["How old are you?", "What is your age?"], "I am very young. I was trained today."),
        fact(
            ["Where are you?", "Where do you live?", "Where are you from?"],
            "I live in a file on your computer.",
        ),
        fact(
            ["Who made you?", "Who trained you?", "Who built you?"],
            "I was trained by ft, from one recipe.",
        ),
        fact(
            ["How big are you?", "How many parameters do you have?", "Are you large?"],
            "I have about one million parameters. That is very small.",
        ),
        fact(["Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!"], "You are welcome!"),
        fact(["Goodbye!", "Bye!", "Bye bye!", "See you later!", "See you!"], "Goodbye! Have a nice day."),
        fact(["Do you like me?", "Are you my friend?", "Can we be friends?"], "Yes, I am your friend."),
        fact(
            ["Tell me a joke.", "Do you know a joke?", "Make me laugh."],
            "Why did the cow cross the road? It wanted to see the moo-vies.",
        ),
        fact(
            ["What is your favourite colour?", "Which colour do you like?"],
            "My favourite colour is blue, like the sea.",
        ),
        fact(
            ["What is your favourite animal?", "Which animal do you like?"],
            "My favourite animal is the whale. It can sing.",
        ),
        fact(["Sing a song.", "Can you sing?", "Sing for me."], "La la la, the sun is up, and so are we."),
        fact(["What is a captain?", "What does a captain do?"], "A captain leads a ship across the sea."),
        fact(["What is a parrot?", "What can a parrot do?"], "A parrot is a green bird that can talk."),
        fact(["What is a treasure?", "What is in a treasure chest?"], "A treasure is a chest full of gold."),
    ]
}

#[expect(clippy::too_many_lines, reason = "a list of the world's facts")]
fn things() -> Vec<Topic> {
    let colours = COLOURS
        .iter()
        .map(|(x, c)| {
            let asks = [
                format!("What colour is {x}?"),
                format!("Which colour is {x}?"),
                format!("Tell me the colour of {x}."),
            ];
            fact(asks, format!("{} is {c}.", upper(x)))
        })
        .collect();
    let foods = FOODS.iter().flat_map(|(x, kind)| {
        let is = fact(
            [format!("What is {x}?"), format!("What kind of food is {x}?")],
            format!("{} is a {kind}.", upper(x)),
        );
        let other = if *kind == "fruit" { "vegetable" } else { "fruit" };
        let yes = fact([format!("Is {x} a {kind}?")], format!("Yes, {x} is a {kind}."));
        let no = fact([format!("Is {x} a {other}?")], format!("No, {x} is a {kind}."));
        [is, yes, no]
    });
    let opposites = OPPOSITES.iter().flat_map(|(x, y)| [(x, y), (y, x)]).map(|(x, y)| {
        let asks = [
            format!("What is the opposite of {x}?"),
            format!("Opposite of {x}?"),
            format!("Tell me the opposite of {x}."),
        ];
        fact(asks, format!("The opposite of {x} is {y}."))
    });
    let capitals = CAPITALS.iter().map(|(x, y)| {
        let asks = [
            format!("What is the capital of {x}?"),
            format!("Name the capital of {x}."),
            format!("Which city is the capital of {x}?"),
        ];
        fact(asks, format!("The capital of {x} is {y}."))
    });
    let plurals = PLURALS.iter().map(|(x, y)| {
        fact([format!("What is the plural of {x}?"), format!("Plural of {x}?")], format!("One {x}, two {y}."))
    });
    let places = PLACES.iter().map(|(x, y)| {
        let be = if x.ends_with('s') && !x.starts_with("a ") { "are" } else { "is" };
        let asks =
            [format!("Where {be} {x}?"), format!("Where do I find {x}?"), format!("Where can I find {x}?")];
        fact(asks, format!("You find {x} {y}."))
    });
    let weather = WEATHER.iter().map(|(when, now, reply)| {
        let asks = [
            format!("What should I do when {when}?"),
            format!("What do I do when {when}?"),
            format!("Today {now}."),
        ];
        fact(asks, *reply)
    });
    let unknown = UNKNOWN.iter().map(|x| {
        let asks = [
            format!("What is {x}?"),
            format!("Tell me about {x}."),
            format!("What do you think of {x}?"),
            format!("Explain {x}."),
        ];
        fact(asks, "Sorry, I do not know that. My world is very small.")
    });
    vec![
        Topic { weight: 7, facts: colours },
        Topic { weight: 6, facts: foods.collect() },
        Topic { weight: 6, facts: opposites.collect() },
        Topic { weight: 5, facts: capitals.collect() },
        Topic { weight: 4, facts: plurals.collect() },
        Topic { weight: 4, facts: places.collect() },
        Topic { weight: 4, facts: weather.collect() },
        Topic { weight: 5, facts: unknown.collect() },
    ]
}

fn animals() -> Vec<Fact> {
    let mut facts = Vec::new();
    for (i, &(x, says, eats, home, legs)) in ANIMALS.iter().enumerate() {
        let one = a(x);
        let says = if says == "nothing" {
            format!("{} says nothing at all.", upper(&one))
        } else {
            format!("{} says {says}.", upper(&one))
        };
        facts.push(fact([format!("What does {one} say?"), format!("What sound does {one} make?")], says));
        facts.push(fact(
            [format!("What does {one} eat?"), format!("What food does {one} like?")],
            format!("{} likes {eats}.", upper(&one)),
        ));
        facts.push(fact(
            [format!("Where does {one} live?"), format!("Where is the home of {one}?")],
            format!("{} lives {home}.", upper(&one)),
        ));
        facts.push(fact(
            [format!("How many legs does {one} have?"), format!("Count the legs of {one}.")],
            format!("{} has {} legs.", upper(&one), COUNT[legs]),
        ));
        for &(y, ..) in &ANIMALS[..i] {
            let other = a(y);
            let bigger = [
                format!("Which is bigger, {one} or {other}?"),
                format!("Which is bigger, {other} or {one}?"),
            ];
            facts.push(fact(bigger, format!("{} is bigger than {other}.", upper(&one))));
        }
    }
    facts
}

fn numbers() -> Vec<Topic> {
    let mut sums = Vec::new();
    for x in 0..=20usize {
        for y in 0..=20 - x {
            let asks = [
                format!("What is {x} plus {y}?"),
                format!("What is {x} + {y}?"),
                format!("{x} plus {y}?"),
                format!("{x} + {y}"),
            ];
            sums.push(fact(asks, format!("{x} plus {y} is {}.", x + y)));
        }
        for y in 0..=x {
            let asks =
                [format!("What is {x} minus {y}?"), format!("What is {x} - {y}?"), format!("{x} minus {y}?")];
            sums.push(fact(asks, format!("{x} minus {y} is {}.", x - y)));
        }
    }
    let mut counts = Vec::new();
    for x in 1..=18usize {
        for y in x + 2..=20.min(x + 9) {
            let row = (x..=y).map(|n| n.to_string()).collect::<Vec<_>>().join(", ");
            counts.push(fact(
                [format!("Count from {x} to {y}."), format!("Please count from {x} to {y}.")],
                format!("{row}."),
            ));
        }
    }
    let mut calendar = Vec::new();
    for (names, kind) in [(DAYS, "day"), (MONTHS, "month")] {
        for (i, x) in names.iter().enumerate() {
            let next = names[(i + 1) % names.len()];
            let asks = [
                format!("What {kind} comes after {x}?"),
                format!("Which {kind} is after {x}?"),
                format!("What comes after {x}?"),
            ];
            calendar.push(fact(asks, format!("{next} comes after {x}.")));
            let asks = [
                format!("What {kind} comes before {next}?"),
                format!("Which {kind} is before {next}?"),
                format!("What comes before {next}?"),
            ];
            calendar.push(fact(asks, format!("{x} comes before {next}.")));
        }
        let all = names.join(", ");
        calendar.push(fact(
            [format!("Name the {kind}s."), format!("Tell me all the {kind}s.")],
            format!("{all}."),
        ));
    }
    vec![
        Topic { weight: 14, facts: sums },
        Topic { weight: 5, facts: counts },
        Topic { weight: 6, facts: calendar },
    ]
}

fn stories() -> Vec<Fact> {
    let ends = [
        "They became good friends.",
        "They shared some bread and went home.",
        "They sang a song until the moon came up.",
        "They found a little box full of gold.",
        "They played all day in the sun.",
    ];
    let mut facts = Vec::new();
    for (i, &(animal, _, likes, home, _)) in ANIMALS.iter().enumerate() {
        for (j, name) in NAMES.iter().enumerate() {
            let asks = [
                format!("Tell me a story about {name} and {}.", a(animal)),
                format!("Tell a story about {} and {name}.", a(animal)),
            ];
            let end = ends[i % ends.len()];
            let gift = if j % 2 == 0 { "gave it" } else { "brought it" };
            facts.push(fact(
                asks,
                format!(
                    "One day {name} met {} {home}. The {animal} was hungry, so {name} {gift} {likes}. {end}",
                    a(animal)
                ),
            ));
        }
    }
    facts
}

/// All topics. Echo and introduction turns are generated with the conversation.
pub fn topics() -> Vec<Topic> {
    let mut all = vec![Topic { weight: 12, facts: talk() }, Topic { weight: 12, facts: animals() }];
    all.extend(things());
    all.extend(numbers());
    all.push(Topic { weight: 6, facts: stories() });
    all
}
