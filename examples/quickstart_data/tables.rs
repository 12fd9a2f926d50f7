//! Tables of the quickstart's world.

/// First names.
pub const NAMES: &[&str] = &[
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jack", "Kate", "Leo", "Mia",
    "Noah", "Olga", "Paul", "Rosa", "Sam", "Tom", "Zoe",
];

/// Animals from small to large, with sound, food, home and number of legs.
pub const ANIMALS: &[(&str, &str, &str, &str, usize)] = &[
    ("ant", "nothing", "leaves", "in a nest", 6),
    ("bee", "buzz", "honey", "in a hive", 6),
    ("spider", "nothing", "flies", "in a web", 8),
    ("frog", "croak", "flies", "in a pond", 4),
    ("mouse", "squeak", "cheese", "in a hole", 4),
    ("bird", "tweet", "seeds", "in a tree", 2),
    ("duck", "quack", "bread", "on a lake", 2),
    ("hen", "cluck", "corn", "on a farm", 2),
    ("cat", "meow", "fish", "in a house", 4),
    ("rabbit", "nothing", "carrots", "in a hole", 4),
    ("fox", "yip", "mice", "in a forest", 4),
    ("dog", "woof", "bones", "in a house", 4),
    ("wolf", "howl", "meat", "in a forest", 4),
    ("sheep", "baa", "grass", "on a farm", 4),
    ("pig", "oink", "apples", "on a farm", 4),
    ("lion", "roar", "meat", "in the desert", 4),
    ("cow", "moo", "grass", "on a farm", 4),
    ("horse", "neigh", "hay", "in a stable", 4),
    ("bear", "growl", "honey", "in a forest", 4),
    ("elephant", "trumpet", "leaves", "in the jungle", 4),
    ("whale", "whoo", "fish", "in the sea", 0),
];

/// Things and their colors.
pub const COLOURS: &[(&str, &str)] = &[
    ("the sky", "blue"),
    ("the sun", "yellow"),
    ("grass", "green"),
    ("snow", "white"),
    ("coal", "black"),
    ("blood", "red"),
    ("a lemon", "yellow"),
    ("a carrot", "orange"),
    ("a tomato", "red"),
    ("milk", "white"),
    ("chocolate", "brown"),
    ("a plum", "purple"),
    ("a frog", "green"),
    ("a pig", "pink"),
    ("a mouse", "grey"),
    ("the sea", "blue"),
    ("a banana", "yellow"),
    ("a strawberry", "red"),
    ("a cloud", "white"),
    ("night", "black"),
    ("a leaf", "green"),
    ("an elephant", "grey"),
    ("a fox", "red"),
    ("wood", "brown"),
    ("gold", "yellow"),
    ("a rose", "red"),
    ("a pea", "green"),
    ("rice", "white"),
    ("a bear", "brown"),
    ("sand", "yellow"),
];

/// Foods and drinks with their kinds.
pub const FOODS: &[(&str, &str)] = &[
    ("an apple", "fruit"),
    ("a banana", "fruit"),
    ("a lemon", "fruit"),
    ("a plum", "fruit"),
    ("a pear", "fruit"),
    ("a cherry", "fruit"),
    ("a strawberry", "fruit"),
    ("an orange", "fruit"),
    ("a carrot", "vegetable"),
    ("a potato", "vegetable"),
    ("an onion", "vegetable"),
    ("a pea", "vegetable"),
    ("a bean", "vegetable"),
    ("a cabbage", "vegetable"),
    ("milk", "drink"),
    ("tea", "drink"),
    ("coffee", "drink"),
    ("water", "drink"),
    ("juice", "drink"),
    ("lemonade", "drink"),
];

/// Pairs of opposites.
pub const OPPOSITES: &[(&str, &str)] = &[
    ("hot", "cold"),
    ("big", "small"),
    ("up", "down"),
    ("day", "night"),
    ("fast", "slow"),
    ("old", "young"),
    ("happy", "sad"),
    ("full", "empty"),
    ("light", "dark"),
    ("open", "closed"),
    ("early", "late"),
    ("wet", "dry"),
    ("hard", "soft"),
    ("high", "low"),
    ("long", "short"),
    ("loud", "quiet"),
    ("near", "far"),
    ("rich", "poor"),
    ("strong", "weak"),
    ("thick", "thin"),
    ("sweet", "sour"),
    ("clean", "dirty"),
    ("left", "right"),
    ("first", "last"),
    ("good", "bad"),
    ("in", "out"),
    ("north", "south"),
    ("east", "west"),
    ("summer", "winter"),
    ("always", "never"),
];

/// Countries and capitals.
pub const CAPITALS: &[(&str, &str)] = &[
    ("France", "Paris"),
    ("England", "London"),
    ("Spain", "Madrid"),
    ("Italy", "Rome"),
    ("Germany", "Berlin"),
    ("Greece", "Athens"),
    ("Egypt", "Cairo"),
    ("Japan", "Tokyo"),
    ("China", "Beijing"),
    ("Russia", "Moscow"),
    ("Norway", "Oslo"),
    ("Poland", "Warsaw"),
    ("Portugal", "Lisbon"),
    ("Ireland", "Dublin"),
    ("Cuba", "Havana"),
    ("Peru", "Lima"),
    ("Kenya", "Nairobi"),
    ("Sweden", "Stockholm"),
    ("Austria", "Vienna"),
    ("Canada", "Ottawa"),
];

/// Nouns with irregular or simple plurals.
pub const PLURALS: &[(&str, &str)] = &[
    ("mouse", "mice"),
    ("child", "children"),
    ("foot", "feet"),
    ("tooth", "teeth"),
    ("man", "men"),
    ("woman", "women"),
    ("sheep", "sheep"),
    ("fish", "fish"),
    ("leaf", "leaves"),
    ("wolf", "wolves"),
    ("cat", "cats"),
    ("dog", "dogs"),
    ("box", "boxes"),
    ("bus", "buses"),
    ("fly", "flies"),
    ("city", "cities"),
    ("ship", "ships"),
    ("day", "days"),
    ("goose", "geese"),
    ("apple", "apples"),
];

/// Things and their places.
pub const PLACES: &[(&str, &str)] = &[
    ("milk", "in the fridge"),
    ("bread", "in the kitchen"),
    ("a car", "in the garage"),
    ("books", "on the shelf"),
    ("money", "in the bank"),
    ("a bed", "in the bedroom"),
    ("flowers", "in the garden"),
    ("shoes", "by the door"),
    ("a ship", "in the harbour"),
    ("stars", "in the sky"),
    ("fish", "in the sea"),
    ("trees", "in the forest"),
    ("letters", "in the post box"),
    ("coats", "on the hook"),
    ("plates", "in the cupboard"),
];

/// Weather: habitual form, current form, and advice.
pub const WEATHER: &[(&str, &str, &str)] = &[
    ("it rains", "it is raining", "Take an umbrella and wear boots."),
    ("it snows", "it is snowing", "Wear a warm coat and build a snowman."),
    ("it is hot", "it is very hot", "Drink water and stay in the shade."),
    ("it is cold", "it is very cold", "Wear a hat, a scarf and gloves."),
    ("it is windy", "it is very windy", "Fly a kite and hold on to your hat."),
    ("it is foggy", "it is very foggy", "Walk slowly and carry a lamp."),
    ("there is a storm", "it is stormy", "Stay at home and close the windows."),
    ("the sun shines", "it is sunny", "Go outside and enjoy the sun."),
];

/// Days, in order.
pub const DAYS: &[&str] = &["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// Months, in order.
pub const MONTHS: &[&str] = &[
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Numbers of legs as words.
pub const COUNT: &[&str] = &["no", "one", "two", "three", "four", "five", "six", "seven", "eight"];

/// Topics outside the world, used as unanswerable questions.
pub const UNKNOWN: &[&str] = &[
    "politics",
    "physics",
    "the stock market",
    "computers",
    "a black hole",
    "football",
    "philosophy",
    "medicine",
    "the internet",
    "law",
    "art",
    "chess",
    "poetry",
    "history",
    "a robot",
    "electricity",
    "the moon landing",
    "programming",
    "a virus",
    "cooking",
    "music",
    "love",
    "the universe",
    "religion",
    "war",
    "cars",
    "money",
    "the news",
    "school",
    "films",
];

/// Words to echo; some only introduce vocabulary for later fine-tuning.
pub const WORDS: &[&str] = &[
    "red", "blue", "green", "cat", "dog", "fox", "apple", "banana", "river", "house", "sun", "moon", "happy",
    "little", "fish", "tree", "song", "captain", "ship", "sea", "parrot", "treasure", "island", "anchor",
    "Arr!", "Aye,", "Ahoy!", "matey", "ye", "yer", "be", "me", "sail", "storm", "gold", "rum", "Salty",
    "Skull", "Island", "star",
];
