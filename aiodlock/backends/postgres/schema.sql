-- What aiodlock keeps in PostgreSQL: tables, and the functions that are the protocol.
--
-- Filled in before it runs: @unlogged@ (the word "unlogged", or nothing), @is_unlogged@ and @version@.
-- Every decision is made and written in one call of `turn`. Calls about the same name wait for each other at an
-- advisory lock; the clock is read behind it. Deadlines are milliseconds of the server's clock, tokens microseconds.
-- A key is the prefix, the kind ("l" or "s") and the percent-encoded name, with colons between them.
--
-- The row of a name is not updated when its holders change: a new version is inserted, the old one is deleted, and
-- the newest is read. Beside a transaction that stays open, the old versions of an updated row cannot be removed,
-- and each look-up would walk through all of them.

create schema aiodlock;

create type aiodlock.holder as (
  id text, mode text, token bigint, deadline bigint, length bigint, delay bigint, owner text, client text
);

-- head: no waiter has a smaller arrival. keep_until: from then on the row of a free name may be deleted.
create @unlogged@ table aiodlock.name (
  key text collate "C" not null,
  version bigint not null,
  token bigint not null,
  keep_until bigint not null,
  head bigint not null,
  holders aiodlock.holder[] not null,
  primary key (key, version)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

create @unlogged@ table aiodlock.waiter (
  key text collate "C" not null,
  arrival bigint not null,
  id text collate "C" not null unique,
  mode text not null,
  owner text not null,
  delay bigint not null,
  client text not null,
  deadline bigint not null,
  length bigint not null,
  since bigint not null,
  primary key (key, arrival)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

-- Requests that were left although a duplicate of their acquire may still arrive, and requests whose lease an
-- operator broke.
create @unlogged@ table aiodlock.marker (id text collate "C" primary key, keep_until bigint not null);
create @unlogged@ table aiodlock.broken (id text collate "C" primary key, keep_until bigint not null);

-- One row: what was installed. longest: the longest that any lease, with its lock-delay, may have been (ms).
create table aiodlock.meta (
  version integer not null, durability text not null, longest bigint not null
);
insert into aiodlock.meta values (
  @version@, case when @is_unlogged@ then 'unlogged' else 'logged' end, 0
);

-- One row, which is gone when the tables are: after a crash of the server, unlogged ones are empty. Nothing is granted
-- before `opened_at` then, because somebody may still believe in a lease that was lost with them.
create @unlogged@ table aiodlock.present (opened_at bigint not null);
insert into aiodlock.present values (0);

-- The server's clock in microseconds. Tests replace this function.
create function aiodlock.clock_us() returns bigint language sql volatile as
$$ select (extract(epoch from clock_timestamp()) * 1000000)::bigint $$;

create function aiodlock.channel(client text) returns text language sql immutable as
$$ select 'aiodlock_' || md5(client) $$;

-- x excludes all, s excludes x, s3 is one of at most three.
create function aiodlock.fits(mode text, holders aiodlock.holder[]) returns boolean
language plpgsql immutable as $$
declare
  h aiodlock.holder;
begin
  if cardinality(holders) = 0 then
    return true;
  end if;
  if mode = 'x' or (length(mode) > 1 and cardinality(holders) >= substr(mode, 2)::bigint) then
    return false;
  end if;
  foreach h in array holders loop
    if h.mode = 'x' then
      return false;
    end if;
  end loop;
  return true;
end $$;

-- The token of what an owner holds by live records, negative if none of them is exclusive; null if it holds nothing.
create function aiodlock.token_of(who text, holders aiodlock.holder[], now_ms bigint) returns bigint
language plpgsql immutable as $$
declare
  h aiodlock.holder;
  found_token bigint;
begin
  foreach h in array holders loop
    if h.owner = who and now_ms < h.deadline then
      if h.mode = 'x' then
        return h.token;
      end if;
      found_token := -h.token;
    end if;
  end loop;
  return found_token;
end $$;

create function aiodlock.earliest_end(holders aiodlock.holder[]) returns bigint
language plpgsql immutable as $$
declare
  h aiodlock.holder;
  earliest bigint;
begin
  foreach h in array holders loop
    earliest := least(earliest, h.deadline + h.delay);
  end loop;
  return earliest;
end $$;

-- With another level the statements of a function do not see what was committed while it waited for a lock.
create function aiodlock.check_isolation() returns void language plpgsql as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'aiodlock needs the isolation level "read committed", and this session has "%"',
      current_setting('transaction_isolation') using errcode = '25001',
      hint = 'ALTER ROLE the_role SET default_transaction_isolation = ''read committed''';
  end if;
end $$;

-- All messages of one client's turn of its event loop, in one call.
--
-- caller     the client's label
-- retention  ms for which a free name's last token is kept
-- ops        one message each, its fields separated by tabs:
--              acquire  key  id  mode  owner  ttl  waiter-ttl  lock-delay  wait|nowait
--              extend   key  id  length  owner
--              leave    key  id  marker-ttl  ended|lost
--              break    key  remember
--              announce key
-- Result: one answer for each message, in the same order, then what this client is notified of.
--   granted TOKEN LEFT | held TOKEN LEFT | busy | deadlock | limit MODE
--   waiting LEFT LOOK FLOOR    LOOK: ms until the earliest blocker ends if at the head, else -1
--   closed LEFT                after a crash that emptied unlogged tables
--   released | withdrawn | gone broken|expired|taken_over|gone | broke NUMBER
-- Notifications, here or by NOTIFY for other clients: granted ID KEY TOKEN | look ID KEY | broken ID KEY TOKEN.
create function aiodlock.turn(caller text, retention bigint, ops text[]) returns text[]
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  answers text[] := '{}';
  heard text[] := '{}';
  now_us bigint;
  now_ms bigint;
  op text;
  f text[];            -- the message's fields
  verb text;
  k text;
  rid text;
  answer text;
  h aiodlock.holder;
  kept aiodlock.holder[];
  mine aiodlock.holder;        -- the record of the request that the message is about, if it holds
  own aiodlock.waiter;         -- the same, if it waits
  -- The name, as it was read and as it will be written.
  present aiodlock.name;
  holding aiodlock.holder[];
  last_token bigint;
  head_at bigint;
  changed boolean;     -- the holders or the token
  touched boolean;     -- only deadlines, or the place where the queue begins
  -- The walk through the queue.
  head aiodlock.waiter;
  moved boolean;       -- the head is a new one, or its blocker ends sooner
  token_held bigint;
  ends bigint;
  client text;
  message text;
  opened_at bigint := 0;
begin
  perform aiodlock.check_isolation();
  -- In one order, so that no two calls wait for each other.
  if cardinality(ops) = 1 then
    perform pg_advisory_xact_lock(1095323471, hashtext(split_part(ops[1], E'\t', 2)));
  else
    perform pg_advisory_xact_lock(1095323471, ordered.hash) from (
      select distinct hashtext(split_part(o, E'\t', 2)) as hash from unnest(ops) o order by 1
    ) ordered;
  end if;
  now_us := aiodlock.clock_us();
  now_ms := now_us / 1000;
  if @is_unlogged@ then
    select p.opened_at into opened_at from aiodlock.present p;
    if opened_at is null then
      -- A pooler may have kept this client's connection, so it did not say hello after the crash.
      perform aiodlock.hello();
      select p.opened_at into opened_at from aiodlock.present p;
    end if;
  end if;

  foreach op in array ops loop
    f := string_to_array(op, E'\t');
    verb := f[1];
    k := f[2];
    rid := f[3];
    answer := null;
    mine := null;
    own := null;
    head := null;
    moved := false;
    changed := false;
    touched := false;

    if verb = 'announce' then
      perform pg_notify(aiodlock.channel('changes ' || k), k);
      answers := answers || 'announced'::text;
      continue;
    end if;
    if verb = 'acquire' and exists (select from aiodlock.marker m where m.id = rid and now_ms < m.keep_until) then
      answers := answers || 'gone gone'::text;
      continue;
    end if;
    if verb = 'acquire' and @is_unlogged@ then
      if opened_at is null or now_ms < opened_at then
        answers := answers || format('closed %s', opened_at - now_ms);
        continue;
      end if;
      update aiodlock.meta m set longest = f[6]::bigint + f[8]::bigint
        where m.longest < f[6]::bigint + f[8]::bigint;
    end if;

    -- Read the name. Holders that are overdue, and past their lock-delay, are dropped.
    select * into present from aiodlock.name n where n.key = k order by n.version desc limit 1;
    last_token := coalesce(present.token, 0);
    head_at := coalesce(present.head, 0);
    holding := coalesce(present.holders, '{}');
    if cardinality(holding) > 0 then
      kept := '{}';
      foreach h in array holding loop
        if h.deadline > now_ms + h.length then
          h.deadline := now_ms + h.length;  -- the clock was set back
          touched := true;
        end if;
        if h.id = rid then
          mine := h;
        end if;
        if now_ms < h.deadline + h.delay then
          kept := kept || h;
        else
          changed := true;
        end if;
      end loop;
      if changed or touched then
        holding := kept;
      end if;
    end if;

    -- What the message changes by itself.
    if verb = 'extend' then
      if now_ms < mine.deadline then
        -- Not shorter than what was promised before: else the clamp would bring the deadline nearer.
        mine.deadline := greatest(mine.deadline, now_ms + f[4]::bigint);
        mine.length := greatest(f[4]::bigint, mine.deadline - now_ms);
        if @is_unlogged@ then
          update aiodlock.meta m set longest = mine.length + mine.delay
            where m.longest < mine.length + mine.delay;
        end if;
        for number in 1 .. cardinality(holding) loop
          if holding[number].id = rid then
            holding[number] := mine;
          end if;
        end loop;
        touched := true;
        answer := format('held %s %s', mine.token, mine.deadline - now_ms);
      else
        select * into own from aiodlock.waiter w where w.id = rid and w.key = k;
        if own.id is not null then
          own.deadline := least(own.deadline, now_ms + own.length);
          if now_ms < own.deadline then
            own.deadline := greatest(own.deadline, now_ms + f[4]::bigint);
            own.length := greatest(f[4]::bigint, own.deadline - now_ms);
            update aiodlock.waiter w set deadline = own.deadline, length = own.length where w.id = rid;
          else
            -- Too late, and maybe at the head: then the next one has to be told, nobody else will.
            moved := not exists (
              select from aiodlock.waiter w where w.key = k and w.arrival >= head_at and w.arrival < own.arrival
            );
            delete from aiodlock.waiter w where w.id = rid;
            own := null;
          end if;
        end if;
      end if;
    elsif verb = 'leave' then
      if f[4] <> '0' then
        insert into aiodlock.marker values (rid, now_ms + f[4]::bigint)
          on conflict (id) do update set keep_until = excluded.keep_until;
      end if;
      if now_ms < mine.deadline and (f[5] <> 'lost' or mine.delay = 0) then
        kept := '{}';
        foreach h in array holding loop
          if h.id <> rid then
            kept := kept || h;
          end if;
        end loop;
        holding := kept;
        changed := true;
        answer := 'released';
      else
        delete from aiodlock.waiter w where w.id = rid and w.key = k returning * into own;
        if own.id is not null then
          moved := not exists (
            select from aiodlock.waiter w where w.key = k and w.arrival >= head_at and w.arrival < own.arrival
          );
        end if;
        -- Lost, here or for its holder, and within its lock-delay: leaving does not open the name early.
        answer := case when mine.id is not null then 'gone expired' when own.id is not null then 'withdrawn'
                  else 'gone gone' end;
        own := null;
      end if;
    elsif verb = 'break' then
      kept := holding;
      holding := '{}';
      changed := true;
      ends := 0;
      foreach h in array kept loop
        if now_ms < h.deadline then
          ends := ends + 1;
          insert into aiodlock.broken values (h.id, greatest(now_ms + f[3]::bigint, h.deadline))
            on conflict (id) do update set keep_until = excluded.keep_until;
          message := format('broken %s %s %s', h.id, k, h.token);
          if h.client = caller then
            heard := heard || message;
          else
            perform pg_notify(aiodlock.channel(h.client), message);
          end if;
        end if;
      end loop;
      answer := 'broke ' || ends;
    end if;

    -- Grant from the head on, as far as the holders allow. Nobody passes the one that stays.
    <<granting>>
    while verb <> 'extend' or answer is null loop
      loop
        select * into head from aiodlock.waiter w
          where w.key = k and w.arrival >= head_at order by w.arrival limit 1;
        exit when head.id is null;
        if head.deadline > now_ms + head.length then
          -- The clock was set back. All at once: many dead waiters cost together what one costs.
          update aiodlock.waiter w set deadline = now_ms + w.length
            where w.key = k and w.deadline > now_ms + w.length;
          head.deadline := now_ms + head.length;
        end if;
        if now_ms >= head.deadline then
          delete from aiodlock.waiter w where w.id = head.id;
          head_at := head.arrival + 1;
          moved := true;
          continue;
        end if;
        token_held := aiodlock.token_of(head.owner, holding, now_ms);
        if token_held > 0 or (token_held < 0 and head.mode <> 'x') then
          token_held := abs(token_held);
        elsif aiodlock.fits(head.mode, holding) then
          token_held := greatest(last_token + 1, now_us);
          last_token := token_held;
        else
          exit;
        end if;
        -- A granted waiter keeps the deadline it had: a ghost that is granted costs no more than one that waits.
        h := row(head.id, head.mode, token_held, head.deadline, head.length, head.delay, head.owner, head.client);
        holding := holding || h;
        delete from aiodlock.waiter w where w.id = head.id;
        head_at := head.arrival + 1;
        changed := true;
        moved := true;
        if head.id = rid then
          mine := h;
          own := null;
        end if;
        message := format('granted %s %s %s', head.id, k, token_held);
        if head.client = caller then
          heard := heard || message;
        else
          perform pg_notify(aiodlock.channel(head.client), message);
        end if;
      end loop;
      -- A waiter whose named owner came to hold meanwhile gets in, wherever it stands.
      exit granting when verb <> 'extend' or own.id is null or own.owner not like 'u%';
      token_held := aiodlock.token_of(own.owner, holding, now_ms);
      exit granting when token_held is null or (token_held < 0 and own.mode = 'x');
      moved := moved or own.deadline + own.delay < aiodlock.earliest_end(holding);
      mine := row(rid, own.mode, abs(token_held), own.deadline, own.length, own.delay, own.owner, own.client);
      holding := holding || mine;
      changed := true;
      delete from aiodlock.waiter w where w.id = rid;
      own := null;
    end loop;

    if verb = 'extend' and answer is null then
      if now_ms < mine.deadline then
        answer := format('held %s %s', mine.token, mine.deadline - now_ms);
      elsif own.id is not null then
        ends := case when head.id = rid then greatest(0, coalesce(aiodlock.earliest_end(holding), now_ms) - now_ms)
                else -1 end;
        answer := format('waiting %s %s %s', own.deadline - now_ms, ends, greatest(last_token, now_us));
      elsif exists (select from aiodlock.broken b where b.id = rid and now_ms < b.keep_until) then
        answer := 'gone broken';
      else
        answer := case when mine.id is not null then 'gone expired' when cardinality(holding) > 0 then 'gone taken_over'
                  else 'gone gone' end;
      end if;
    elsif answer like 'gone %' and exists (select from aiodlock.broken b where b.id = rid and now_ms < b.keep_until) then
      answer := 'gone broken';
    elsif verb = 'acquire' then
      if head.id is not null or cardinality(holding) > 0 or present.key is null then
        select * into own from aiodlock.waiter w where w.id = rid and w.key = k;
      end if;
      if own.id is not null and now_ms >= least(own.deadline, now_ms + own.length) then
        delete from aiodlock.waiter w where w.id = rid;
        own := null;
      end if;
      token_held := case when cardinality(holding) > 0 then aiodlock.token_of(f[5], holding, now_ms) end;
      if mine.id is not null and now_ms < mine.deadline then
        answer := format('granted %s %s', mine.token, mine.deadline - now_ms);
      elsif mine.id is not null and now_ms < mine.deadline + mine.delay then
        answer := 'gone gone';
      elsif own.id is null and length(f[4]) > 1 and f[4] <> coalesce(holding[1].mode, head.mode, f[4]) then
        -- Every request for a semaphore carries its limit in the mode; two limits for one name are a mistake.
        answer := 'limit ' || coalesce(holding[1].mode, head.mode);
      elsif own.id is null and token_held < 0 and f[4] = 'x' then
        answer := 'deadlock';
      elsif own.id is null and (token_held is not null or (head.id is null and aiodlock.fits(f[4], holding))) then
        moved := moved or now_ms + f[6]::bigint + f[8]::bigint < aiodlock.earliest_end(holding);
        if token_held is null then
          token_held := greatest(last_token + 1, now_us);
          last_token := token_held;
        end if;
        holding := holding || row(
          rid, f[4], abs(token_held), now_ms + f[6]::bigint, f[6]::bigint, f[8]::bigint, f[5], caller
        )::aiodlock.holder;
        changed := true;
        answer := format('granted %s %s', abs(token_held), f[6]);
      elsif own.id is null and f[9] = 'nowait' then
        answer := 'busy';
      else
        if own.id is null then
          select coalesce(max(w.arrival) + 1, head_at) into ends from aiodlock.waiter w
            where w.key = k and w.arrival >= head_at;
          own := row(k, ends, rid, f[4], f[5], f[8], caller, now_ms + f[7]::bigint, f[7], now_ms);
          insert into aiodlock.waiter select own.*;
          head := case when head.id is null then own else head end;
        end if;
        ends := case when head.id = rid then greatest(0, coalesce(aiodlock.earliest_end(holding), now_ms) - now_ms)
                else -1 end;
        answer := format('waiting %s %s %s', own.deadline - now_ms, ends, greatest(last_token, now_us));
      end if;
    end if;

    -- A head that did not know when to look is told to, unless it will ask soon enough by itself.
    if moved and head.id is not null and head.id <> coalesce(rid, '') or verb = 'break' and head.id is not null then
      if aiodlock.earliest_end(holding) < head.deadline - head.length * 2 / 3 then
        message := format('look %s %s', head.id, k);
        if head.client = caller then
          heard := heard || message;
        else
          perform pg_notify(aiodlock.channel(head.client), message);
        end if;
      end if;
    end if;

    -- Write what has changed. The row outlives its holding, and the last token by `retention`.
    if changed or touched or head_at > coalesce(present.head, 0) + 64 then
      ends := coalesce(present.keep_until, 0);
      if last_token is distinct from present.token then
        ends := greatest(ends, greatest(now_ms, last_token / 1000 + 1) + retention);
      end if;
      foreach h in array holding loop
        ends := greatest(ends, h.deadline + h.delay);
      end loop;
      if present.key is null then
        insert into aiodlock.name values (k, 1, last_token, ends, head_at, holding);
      elsif changed then
        insert into aiodlock.name values (k, present.version + 1, last_token, ends, head_at, holding);
        delete from aiodlock.name n where n.key = k and n.version = present.version;
      else
        update aiodlock.name n set holders = holding, keep_until = ends, head = head_at
          where n.key = k and n.version = present.version;
      end if;
    end if;
    answers := answers || answer;
  end loop;
  return answers || heard;
end $$;

-- What people want to know of a name. First a row about the name: its last token, the ms for which lock-delay
-- keeps it closed, and how many holders' places. Then the holders, then the waiters in their order. Writes nothing.
create function aiodlock.inspect(k text) returns table (
  what text, owner text, mode text, token bigint, left_ms bigint, client text, places bigint
) language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
  now_ms bigint := aiodlock.clock_us() / 1000;
begin
  return query
    with present as (
      select * from aiodlock.name n where n.key = k order by n.version desc limit 1
    ), holding as (
      select h.*, least(h.deadline, now_ms + h.length) as ends from present, unnest(present.holders) h
    ), closing as (
      select max(h.ends + h.delay) - now_ms as closed, count(*) as places from holding h
      where h.ends <= now_ms and now_ms < h.ends + h.delay
    )
    select 'name', null, null, case when now_ms < p.keep_until then p.token else 0 end, coalesce(c.closed, 0),
      null, c.places from present p, closing c
    union all
    select 'holder', h.owner, h.mode, h.token, h.ends - now_ms, h.client, 0 from holding h where now_ms < h.ends;
  return query
    select 'waiter', w.owner, w.mode, 0::bigint, greatest(0, now_ms - w.since), w.client, 0::bigint
    from aiodlock.waiter w
    where w.key = k and now_ms < least(w.deadline, now_ms + w.length) order by w.arrival;
end $$;

-- Delete what has had its time. One client at a time, now and then; a name's lock is taken only if nobody has it.
create function aiodlock.sweep(most integer) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  now_ms bigint := aiodlock.clock_us() / 1000;
  candidate record;
  swept integer := 0;
begin
  if not pg_try_advisory_xact_lock(1095323472, 0) then
    return 0;
  end if;
  delete from aiodlock.marker m where m.keep_until <= now_ms;
  delete from aiodlock.broken b where b.keep_until <= now_ms;
  for candidate in
    select n.key, n.version from aiodlock.name n where n.keep_until <= now_ms
      and not exists (select from aiodlock.waiter w where w.key = n.key) limit most
  loop
    if pg_try_advisory_xact_lock(1095323471, hashtext(candidate.key)) then
      delete from aiodlock.name n where n.key = candidate.key and n.version = candidate.version
        and not exists (select from aiodlock.waiter w where w.key = candidate.key)
        and not exists (select from aiodlock.name m where m.key = candidate.key and m.version > n.version);
      swept := swept + 1;
    end if;
  end loop;
  return swept;
end $$;

-- A client that has connected: what is installed here. Sees, too, whether a crash has emptied the tables.
create function aiodlock.hello(out version integer, out durability text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform aiodlock.check_isolation();
  select m.version, m.durability into version, durability from aiodlock.meta m;
  if durability = 'unlogged' then
    perform pg_advisory_xact_lock(1095323472, 1);
    insert into aiodlock.present select aiodlock.clock_us() / 1000 + m.longest from aiodlock.meta m
      where not exists (select from aiodlock.present);
  end if;
end $$;

-- The keys that are held or waited for and begin so.
create function aiodlock.names(beginning text) returns setof text
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select n.key from aiodlock.name n where starts_with(n.key, beginning) and cardinality(n.holders) > 0
  union
  select w.key from aiodlock.waiter w where starts_with(w.key, beginning)
$$;

revoke all on all functions in schema aiodlock from public;
