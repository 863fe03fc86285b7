// Search in the built pages, also where they are opened from disk: there a page may load scripts, but fetch nothing.
(function () {
  const input = document.getElementById("mkdocs-search-query");
  const list = document.getElementById("mkdocs-search-results");
  if (!input || !list) return;

  function load(name, then) {
    const script = document.createElement("script");
    script.src = base_url.replace(/\/$/, "") + "/search/" + name;
    script.onload = then;
    document.head.appendChild(script);
  }

  function show(found) {
    list.replaceChildren();
    for (const page of found) {
      const article = document.createElement("article");
      const heading = article.appendChild(document.createElement("h3"));
      const link = heading.appendChild(document.createElement("a"));
      link.href = base_url.replace(/\/$/, "") + "/" + page.location;
      link.textContent = page.title;
      article.appendChild(document.createElement("p")).textContent = page.text.substring(0, 200);
      list.appendChild(article);
    }
    if (!found.length) {
      list.appendChild(document.createElement("p")).textContent = list.dataset.noResultsText || "No results found";
    }
  }

  function begin() {
    const pages = new Map(search_index.docs.map((page) => [page.location, page]));
    const index = lunr(function () {
      this.ref("location");
      this.field("title", { boost: 5 });
      this.field("text");
      search_index.docs.forEach((page) => this.add(page));
    });
    const look = () => {
      const words = input.value.replace(/[+\-:^~*]/g, " ").trim(); // words, not lunr's operators
      show(words ? index.search(words).map((one) => pages.get(one.ref)) : []);
    };
    input.addEventListener("input", look);
    input.value = new URLSearchParams(window.location.search).get("q") || input.value;
    look();
  }

  load("lunr.js", () => load("search_index.js", begin));
})();
